"""Rows of other projects' forms are trained on as the messages that stand in them, written by hand."""

import json
from pathlib import Path

import pytest
from support.runs.foreign_rows import (
    CALL_SWIFT,
    REFUSED,
    RESULT_SWIFT,
    RL,
    SFT,
    SKY,
    assistant,
    system,
    user,
)
from support.runs.runs import TINY, write_rows

from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data.chat import load_tokenizer, tokenize_row
from isoloss.engine.data.columns import check_mapping, mapping_lines, recognised, unused
from isoloss.engine.data.files.kinds import KINDS
from isoloss.engine.data.forms import BY_NAME, FORMS
from isoloss.engine.data.rows import Row
from isoloss.engine.rl.prompts import load_prompts
from isoloss.parallel.runtime.errors import UserError

PLAIN = DataConfig()
# It writes what the shipped one does not read: tools, and calls of them.
TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] | default('') }}{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = load_tokenizer(str(TINY), 2048)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def without_ids(values: dict) -> dict:
    """The row without the ids of calls, which only OpenAI's rows have."""
    if "messages" not in values:
        return values
    messages = [
        {**m, "tool_calls": [{k: v for k, v in c.items() if k != "id"} for c in m["tool_calls"]]}
        if "tool_calls" in m
        else m
        for m in values["messages"]
    ]
    return {**values, "messages": messages}


@pytest.mark.parametrize("name", SFT)
def test_a_row_of_fine_tuning(name, tokenizer):
    given, meant, form = SFT[name]
    row = recognised(given, "r:1", PLAIN)
    assert row.form == form
    found = tokenize_row(Row("r:1", without_ids(row.values)), tokenizer)
    assert found == tokenize_row(Row("r:1", meant), tokenizer)
    text = tokenizer.decode(found[0])
    for message in meant.get("messages", ()):
        assert f"<|im_start|>{message['role']}\n{message.get('content', '')}" in text
    assert set(unused(row.values)) <= {"level", "type", "parallel_tool_calls"}


def test_the_turns_of_a_history_are_learned(tokenizer):
    given, _, _ = SFT["LLaMA-Factory Alpaca"]
    tokens_T, mask_T = tokenize_row(recognised(given, "r:1", PLAIN), tokenizer)
    learned = tokenizer.decode([token for token, target in zip(tokens_T, mask_T) if target])
    assert learned == "first response<|im_end|>second response<|im_end|>model response<|im_end|>"


@pytest.mark.parametrize("name", RL)
def test_a_row_of_prompts(name, tokenizer, tmp_path):
    given, prompt, answer, form, extra = RL[name]
    path = str(write_rows(tmp_path / "rows.jsonl", [given]))
    found = load_prompts(DataConfig(train=(path,)), "train", tokenizer, max_prompt_tokens=512)
    (only,) = found.prompts
    if isinstance(prompt, str):
        assert (only.prompt, tokenizer.decode(only.tokens)) == (prompt, prompt)
    else:
        assert list(only.prompt) == prompt
        turns = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in prompt)
        assert tokenizer.decode(only.tokens) == turns + "<|im_start|>assistant\n"
    assert (only.answer, only.extra, dict(found.forms)) == (answer, extra, {form: 1})


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_of_what_is_not_trained(name):
    given, said = REFUSED[name]
    with pytest.raises(UserError) as error:
        recognised(given, "r:1", PLAIN)
    assert str(error.value).startswith("r:1: ") and said in str(error.value)
    assert "\n" not in str(error.value)


def test_what_reads_like_a_preference_and_is_none():
    """A class is a label too, and a prompt of reinforcement learning may have one."""
    for label in (3, "positive", None, 1):
        row = recognised({"prompt": "a", "completion": "b", "label": label}, "r:1", PLAIN)
        assert row.form == "prompt + completion"
    assert recognised({"messages": SKY[:1], "label": True}, "r:1", PLAIN, prompts=True).form == "messages"
    with pytest.raises(UserError, match="unpaired preference"):
        recognised({"prompt": "a", "completion": "b", "label": "True"}, "r:1", PLAIN)  # as CSV has it


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"question": "q", "answer": "a", "query": "q", "response": "a"}, "query/response (`query` + `response`) and"),
        ({"instruction": "i", "input": "x", "output": "o", "text": "t"}, "`instruction` would not be seen by the m"),
        ({"question": "q", "choices": ["a", "b"], "answer": "a"}, "`choices` would not be seen by the model, in a"),
        ({"question": "q", "context": "c", "answer": "a"}, "`context` would not be seen"),
        ({"question": "q", "answer": 3}, "`answer` must be text, not int 3"),
        ({"question": ["q"], "answer": "a"}, "`question` must be text, not list"),
        ({"query": "q", "response": "r", "history": "h"}, "`history` must be a list of [question, answer], not str"),
        ({"query": "q", "response": "r", "history": [["a"]]}, "`history` must be a list of [question, answer]"),
        ({"query": "q", "response": "r", "history": [["a", 1]]}, "`history[0]` must be text, not int 1"),
        ({"conversation": [{"human": "q", "gpt": "a"}]}, "`conversation` must be a list of {human, assistant}"),
        ({"conversations": "x"}, "`conversations` must be a list of {from, value} messages, not str 'x'"),
        ({"conversations": [{"from": "human"}]}, "`conversations[0]` must be an object with from and value"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "`conversations[0].from` is str 'narrator'"),
        ({"conversations": [{"from": "gpt", "value": "x", "content": "y"}]}, "`conversations[0]` has from, value and"),
        ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, "`conversations[0].value` is not JSON"),
        ({"messages": [CALL_SWIFT | {"content": "f(1)"}]}, "`messages[0].content` is not JSON (Expecting value at col"),
        ({"messages": [CALL_SWIFT | {"content": "[]"}]}, "`messages[0].content` is str '[]': a call is JSON of {name,"),
        ({"messages": [CALL_SWIFT | {"content": '{"x": 1}'}]}, "`messages[0].content` is str '{\"x\": 1}': a call is"),
        ({"messages": [user("q"), CALL_SWIFT | {"content": None}]}, "`messages[1].content` is NoneType None: a call"),
        ({"messages": [CALL_SWIFT, RESULT_SWIFT | {"content": {"a": 1}}]}, "`messages[1].content`, the result of a"),
        ({"messages": [assistant("t", loss=False), CALL_SWIFT]}, "give both the same loss"),
        ({"messages": [CALL_SWIFT | {"loss": True}, CALL_SWIFT | {"loss": False}]}, "give both the same loss"),
        ({"conversations": [{"from": "function_call", "value": "{}", "weight": weight} for weight in (1, 0)]},
         "`conversations[1]` is a call of the turn before it, and a turn is learned whole or not"),
        ({"messages": SKY, "functions": [{}], "tools": [{}]}, "the row has `functions` and `tools`"),
        ({"messages": SKY, "functions": "f"}, "`functions` must be a list of JSON schemas"),
        ({"messages": [system("s"), *SKY], "system": "t"}, "a column `system` and a system message in `messages`"),
        ({"text": "t", "system": "s"}, "`system` reaches the model through the chat template, and `text` is not me"),
        ({"messages": SKY, "system": ["s"]}, "`system` must be text, not list"),
        ({"prompt": "a"}, "a `prompt` alone is for reinforcement learning"),
    ],
)  # fmt: skip
def test_a_row_that_could_be_read_in_two_ways_or_in_none(given, said):
    with pytest.raises(UserError) as error:
        recognised(given, "r:1", PLAIN)
    assert str(error.value).startswith("r:1: ") and said in str(error.value)


def test_a_row_of_an_own_form_stays_as_it_is():
    for more in ({"question": "q", "answer": "a"}, {"conversations": [], "problem": "p"}):
        row = recognised({"messages": SKY, **more}, "r:1", PLAIN)
        assert row.values == {"messages": SKY, **more} and row.form == "messages"


def test_columns_that_the_user_names():
    given = {"problem": "q", "info": {"solved": {"short": "a"}}, "messages": SKY, "query": "x", "id": 1}
    data = DataConfig(columns={"question": "problem", "answer": "info.solved.short"})
    row = recognised(given, "r:1", data)
    assert row.values == {"messages": [user("q"), assistant("a")], "id": 1}
    assert (row.form, row.aside) == ("question/answer", ("messages", "query"))
    row = recognised(given, "r:1", data, prompts=True)
    assert row.values["prompt"] == [user("q")] and row.values["answer"] == "a" and row.values["problem"] == "q"
    plain = DataConfig(columns={"prompt": "problem", "completion": "info.solved.short"})
    assert recognised(given, "r:1", plain).values == {"prompt": "q", "completion": "a", "id": 1}
    dotted = recognised({"a.b": "q", "c": "a"}, "r:1", DataConfig(columns={"question": "a.b", "answer": "c"}))
    assert dotted.values == {"messages": [user("q"), assistant("a")]}
    assert mapping_lines("data.train", ["question/answer"], data) == [
        "data.train: data.columns: problem -> question, info.solved.short -> answer",
        "data.train: question/answer rows: question -> user, answer -> assistant",
    ]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"question": "problm"}, "r:1: no column `problm`, which data.columns names (keys: info, problem)"),
        ({"question": "info.b"}, "r:1: no column `info.b`"),
        ({"question": "problem.b"}, "r:1: no column `problem.b`"),
        ({"qestion": "problem"}, "data.columns.qestion: not a column that isoloss reads: answer, completion"),
        ({"question": 3}, "data.columns.question=3 must be the name of a column"),
        ({"question": "problem"}, "r:1: unknown kind of row"),
    ],
)
def test_a_mapping_that_names_nothing(columns, said):
    data = DataConfig(columns=columns)
    with pytest.raises(UserError) as error:
        check_mapping(data)
        recognised({"problem": "q", "info": {"a": "x"}}, "r:1", data)
    assert str(error.value).startswith(said)


def test_a_column_that_is_null_may_be_missing_and_others_may_not():
    data = DataConfig(columns={"question": "q", "answer": "a", "system": "s"})
    assert recognised({"q": "x", "a": "y", "s": None}, "r:1", data).values == {"messages": [user("x"), assistant("y")]}
    with pytest.raises(UserError, match="no column `s`"):
        recognised({"q": "x", "a": "y"}, "r:1", data)


def test_nulls_of_arrow_are_left_out_under_any_name():
    message = {"role": "assistant", "content": "a", "tool_calls": None}
    data = DataConfig(columns={"messages": "dialog"})
    assert recognised({"dialog": [message]}, "r:1", data, nulls=False).values["messages"] == [assistant("a")]
    assert recognised({"dialog": [message]}, "r:1", data).values["messages"] == [message]


def test_a_system_message_for_rows_without_one():
    data = DataConfig(system="Be brief.")
    brief, developer = system("Be brief."), {"role": "developer", "content": "d"}
    for given, messages, keeps in (
        ({"messages": SKY}, [brief, *SKY], False),
        ({"messages": [system("s"), *SKY]}, [system("s"), *SKY], True),
        ({"messages": [developer, *SKY]}, [developer, *SKY], True),
        ({"messages": SKY, "system": "t"}, [system("t"), *SKY], True),
        ({"messages": SKY, "system": ""}, [brief, *SKY], False),
        ({"question": "q", "answer": "a", "prompt": "id"}, [brief, user("q"), assistant("a")], False),
    ):  # fmt: skip
        row = recognised(given, "r:1", data)
        assert (row.values["messages"], row.keeps_system) == (messages, keeps)
        assert "system" not in row.values
    row = recognised({"prompt": "q", "completion": SKY[1:]}, "r:1", data)
    assert row.values["prompt"] == [brief, user("q")]
    for prompts, given in (
        (False, {"prompt": "q", "completion": "a"}),
        (False, {"text": "t"}),
        (True, {"prompt": "q"}),
    ):
        with pytest.raises(UserError, match=r"r:1: data.system reaches the model through the chat template"):
            recognised(given, "r:1", data, prompts)
    assert recognised({"problem": "q"}, "r:1", data, prompts=True).values["prompt"] == [brief, user("q")]


def test_the_page_of_formats_has_every_form_and_kind():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    rows = json.loads(page.partition("```json\n")[2].partition("```")[0])
    shown = {recognised(row, "r:1", PLAIN).form for row in rows}
    assert shown == {*BY_NAME, "messages", "prompt + completion", "text"}
    for kind in KINDS:
        assert f"`{'`, `'.join(kind.suffixes)}`" in page


def test_the_page_of_formats_has_calls_as_ms_swift_writes_them():
    """The row of the page, and by hand the conversation that it is."""
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    (given,) = json.loads(page.partition("<!-- file: calls.json -->\n```json\n")[2].partition("```")[0])
    row = recognised(given, "r:1", PLAIN)
    assert row.form == "messages with tool_call"
    assert row.values["messages"] == [
        user("How is the air in Rome and in Oslo?"),
        assistant("I look both up.", tool_calls=[
            {"type": "function", "function": {"name": "aqi", "arguments": {"city": "Rome"}}},
            {"type": "function", "function": {"name": "aqi", "arguments": {"city": "Oslo"}}},
        ]),
        {"role": "tool", "content": '{"aqi": 72}'},
        {"role": "tool", "content": '{"aqi": 10}'},
        assistant("Oslo's is better."),
    ]  # fmt: skip
    assert mapping_lines("data.train", ["messages", row.form], PLAIN) == [
        "data.train: messages with tool_call: tool_call -> tool_calls of the assistant, tool_response -> tool"
    ]
    asked = recognised({"messages": given["messages"][:-1]}, "r:1", PLAIN, prompts=True)
    assert (asked.form, asked.values["messages"]) == (row.form, row.values["messages"][:-1])


def test_the_table_has_one_form_for_a_set_of_columns():
    assert len(BY_NAME) == len({form.columns for form in FORMS}) == len(FORMS)
    assert {form for _, _, form in SFT.values()} >= BY_NAME.keys()
