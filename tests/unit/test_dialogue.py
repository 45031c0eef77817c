"""Messages and tokens: what was made is never encoded again; calls of tools are found as the template writes them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.rl.agents.dialogue import Dialogue, Exchange
from isoloss.engine.rl.agents.tool_calls import EXAMPLE_TOOL, hermes
from isoloss.engine.rl.trajectory import Completion, Finish
from isoloss.parallel import UserError

SORT = Path(__file__).parents[2] / "recipes" / "assets" / "sort"
TOKENIZER: Any = load_tokenizer(str(SORT), 100_000)
STOP = TOKENIZER.eos_token_id
USER = {"role": "user", "content": "go"}
# Hermes' form; an answer of a tool as a turn of the user; thoughts of earlier turns are stripped.
HERMES = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] if m['role'] != 'tool' else 'user' }}
{{ m['content'].split('~')[-1] if m['role'] == 'assistant' else m['content'] }}{% for c in m['tool_calls'] or [] %}
<tool_call>
{"name": "{{ c['function']['name'] }}", "arguments": {{ c['function']['arguments'] | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tokenizer(template=HERMES):
    made: Any = load_tokenizer(str(SORT), 100_000)
    made = type(made).from_pretrained(str(SORT))
    made.chat_template = template
    return made


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def letters(text):
    """Return a token for each character, as a weak model may make them: the tokenizer joins some."""
    return [token for letter in text for token in ids(letter)]


def second(dialogue, tokens, finish: Finish = "stop", tools=None):
    """Return the reply of these tokens, the tokens that the model reads next, and how they came about."""
    counts: Counter[str] = Counter()
    normal, read = dialogue.prompt([USER], tools, [], counts)
    reply = dialogue.reply(Completion("x", tokens, [0.0] * len(tokens), [0] * len(tokens), finish), read, tools, 0)
    exchange = Exchange(dialogue.normal_form([*normal, reply], tools), (*read, *tokens), finish == "stop", reply)
    assert not counts
    messages = [USER, reply, {"role": "tool", "content": "7"}]
    _, again = dialogue.prompt(messages, tools, [exchange], counts)
    return reply, read, again, counts


def test_a_template_that_appends():
    tokens = [*ids("look:a"), STOP]
    _, read, again, counts = second(Dialogue(TOKENIZER, {}, "append", None), tokens)
    assert list(again) == [*read, *tokens, *ids("\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")]
    assert counts == {"turns_appended": 1}


def test_replies_in_other_tokens_than_the_tokenizers_are_kept():
    text = next(t for t in ("go go go", "the user", "digits of", "<|im_start|>x", "  ") if letters(t) != ids(t))
    tokens = [*letters(text), STOP]
    _, read, again, counts = second(Dialogue(TOKENIZER, {}, "append", None), tokens)
    assert list(again) == [*read, *tokens, *ids("\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")]
    assert counts == {"turns_spliced": 1}
    _, read, again, counts = second(Dialogue(TOKENIZER, {}, "template", None), tokens)
    assert counts == {"turns_branched": 1} and list(again)[: len(read) + len(tokens)] != [*read, *tokens]


def test_a_reply_that_was_cut_gets_the_templates_end():
    tokens = [*letters("go go go")]
    _, read, again, _ = second(Dialogue(TOKENIZER, {}, "append", None), tokens, finish="length")
    assert list(again) == [*read, *tokens, *ids("<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")]


def test_thoughts_that_the_template_strips_are_kept_or_a_branch():
    tokens = [*ids("think~go"), STOP]
    _, read, again, counts = second(Dialogue(tokenizer(), {}, "append", None), tokens)
    assert list(again)[: len(read) + len(tokens)] == [*read, *tokens] and counts == {"turns_spliced": 1}
    _, read, again, counts = second(Dialogue(tokenizer(), {}, "template", None), tokens)
    assert "think" not in TOKENIZER.decode(list(again)) and counts == {"turns_branched": 1}


def test_calls_of_tools():
    dialogue = Dialogue(tokenizer(), {}, "append", "hermes")
    text = 'so\n<tool_call>\n{"name": "look_up", "arguments": {"place": "x", "count": 2}}\n</tool_call>'
    reply, read, again, _counts = second(dialogue, [*ids(text), STOP], tools=[EXAMPLE_TOOL])
    (call,) = reply["tool_calls"]
    assert (
        call["function"] == {"name": "look_up", "arguments": '{"place": "x", "count": 2}'} and call["id"] == "call_0_0"
    )
    assert reply["content"] == "so" and list(again)[: len(read) + len(ids(text)) + 1] == [*read, *ids(text), STOP]
    reply, *_ = second(dialogue, [*ids(text), STOP])  # without tools the text stays
    assert reply == {"role": "assistant", "content": text}


@pytest.mark.parametrize("text", ["<tool_call>{not json}</tool_call>", '<tool_call>{"name": 3}</tool_call>', "no call"])
def test_malformed_calls_stay_text(text):
    assert hermes(text) == (text, [])


def test_calls_of_unknown_names_are_calls():
    both = '<tool_call>{"name": "a"}</tool_call> and <tool_call>{"name": "b", "arguments": {"x": {}}}</tool_call>'
    assert hermes(both) == ("and", [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": {}}}])


def test_a_parser_of_another_template_is_refused():
    other = HERMES.replace("<tool_call>", "[CALL]").replace("</tool_call>", "[/CALL]")
    with pytest.raises(
        UserError, match=r"agent\.tool_parser=hermes does not find the call that the chat template writes"
    ):
        Dialogue(tokenizer(other), {}, "append", "hermes")


def test_tools_without_a_parser_are_refused():
    with pytest.raises(UserError, match="nothing finds calls in the replies"):
        Dialogue(tokenizer(), {}, "append", None).prompt([USER], [EXAMPLE_TOOL], [], Counter())


def test_another_list_of_tools_is_another_history():
    dialogue, tokens = Dialogue(tokenizer(), {}, "append", "hermes"), [*ids("go"), STOP]
    normal, read = dialogue.prompt([USER], None, [], Counter())
    reply = {"role": "assistant", "content": "go"}
    exchange = Exchange(dialogue.normal_form([*normal, reply], None), (*read, *tokens), True, reply)
    counts: Counter[str] = Counter()
    _, again = dialogue.prompt([USER, reply, USER], [EXAMPLE_TOOL], [exchange], counts)
    assert "look_up" in TOKENIZER.decode(list(again)) and not counts


def test_messages_that_nothing_can_follow():
    with pytest.raises(UserError, match="ends with the assistant's turn"):
        Dialogue(TOKENIZER, {}, "append", None).prompt(
            [USER, {"role": "assistant", "content": "x"}], None, [], Counter()
        )
