"""Loss masks: what is a target, read back as text."""

import json
import shutil
from importlib.resources import files

import pytest

from isoloss.engine.chat import load_tokenizer, maps_characters, tokenize_row
from isoloss.engine.rows import Row
from isoloss.parallel.errors import UserError

TINY = str(files("isoloss.recipes") / "assets" / "tiny")

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like Qwen3's: a turn is rendered with thoughts, empty ones if need be, only after the last user message.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ (m['content'] if loop.index0 > ns.last else m['content'].split('</think>')[-1].lstrip()) + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The end-of-turn token only after users and at the very end.
END_TOKEN_LAST = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% if loop.last or m['role'] != 'assistant' %}{{ '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_END_TOKEN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
COUNTING = "{{ messages | length }} messages\n" + CHATML
REFUSES_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And\n\n3 + 3?"},
    {"role": "assistant", "content": "Six,\nit is.\n"},
]


@pytest.fixture
def tokenizer():
    return load_tokenizer(TINY, 2048)


def targets(tokenizer, values: dict) -> list[str]:
    """The runs of targets of a row, decoded."""
    tokens_T, mask_T = tokenize_row(Row("rows.jsonl:7", values), tokenizer)
    assert len(tokens_T) == len(mask_T) and not mask_T[0]
    runs, before = [], False
    for token, is_target in zip(tokens_T, mask_T):
        if is_target:
            runs = [*runs[:-1], [*runs[-1], token]] if before else [*runs, [token]]
        before = is_target
    return [tokenizer.decode(run) for run in runs]


def test_messages_assistant_turns_with_their_end_token(tokenizer):
    assert targets(tokenizer, {"messages": CHAT}) == ["Four.<|im_end|>", "Six,\nit is.\n<|im_end|>"]


@pytest.mark.parametrize("chat", [CHAT, CHAT[1:], CHAT[1:3], [*CHAT, CHAT[1]], [*CHAT[:3], CHAT[2], *CHAT[3:]]])
def test_marks_and_prefixes_agree(tokenizer, chat):
    row = Row("rows.jsonl:7", {"messages": chat})
    marked = tokenize_row(row, tokenizer)
    tokenizer.chat_template = CHATML
    assert tokenize_row(row, tokenizer) == marked


def test_template_that_renders_the_last_turn_otherwise(tokenizer):
    tokenizer.chat_template = THINKING
    found = targets(tokenizer, {"messages": CHAT})
    assert found == ["Four.<|im_end|>", "<think>\n\n</think>\n\nSix,\nit is.\n<|im_end|>"]
    thinking = [*CHAT[:2], {"role": "assistant", "content": "<think>2 + 2</think>\n\nFour."}, *CHAT[3:]]
    assert targets(tokenizer, {"messages": thinking}) == found


def test_template_without_end_token(tokenizer):
    tokenizer.chat_template = NO_END_TOKEN
    assert targets(tokenizer, {"messages": CHAT[1:3]}) == [" Four.\n"]


def test_tokenizer_that_trims_offsets(tokenizer, tmp_path):
    """White space at the border of a turn: transformers' own mask goes wrong there."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(f"{TINY}/{name}", tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    trimming = load_tokenizer(str(tmp_path), 2048)
    assert maps_characters(tokenizer) and not maps_characters(trimming)
    chat = [CHAT[1], {"role": "assistant", "content": " Four."}, CHAT[3], CHAT[4]]
    assert targets(trimming, {"messages": chat}) == [" Four.<|im_end|>", "Six,\nit is.\n<|im_end|>"]


def test_prompt_and_completion_texts(tokenizer):
    row = {"prompt": "The capital of France is", "completion": " Paris."}
    assert targets(tokenizer, row) == [" Paris.<|im_end|>"]
    tokens_T, _ = tokenize_row(Row("r:1", row), tokenizer)
    assert tokenizer.decode(tokens_T) == "The capital of France is Paris.<|im_end|>"
    assert targets(tokenizer, {"prompt": "", "completion": "Paris, I say."})[0].endswith("I say.<|im_end|>")


def test_no_end_is_added_where_the_tokenizer_has_none(tokenizer):
    tokenizer.eos_token = None
    assert targets(tokenizer, {"prompt": "One,", "completion": " two"}) == [" two"]
    assert targets(tokenizer, {"text": "One two"})[0].endswith(" two")


@pytest.mark.parametrize("template", [None, CHATML])
@pytest.mark.parametrize("completion", ["Six.", [{"role": "assistant", "content": "Six."}]])
def test_prompt_messages_only_the_completion_is_learnt(tokenizer, template, completion):
    tokenizer.chat_template = template or tokenizer.chat_template
    assert targets(tokenizer, {"prompt": CHAT[:4], "completion": completion}) == ["Six.<|im_end|>"]


def test_prompt_text_with_completion_messages(tokenizer):
    row = {"prompt": "2 + 2?", "completion": [{"role": "assistant", "content": "4"}]}
    assert targets(tokenizer, row) == ["4<|im_end|>"]
    tokens_T, _ = tokenize_row(Row("r:1", row), tokenizer)
    assert tokenizer.decode(tokens_T).startswith("<|im_start|>user\n2 + 2?<|im_end|>")


def test_text_every_token_but_the_first(tokenizer):
    tokens_T, mask_T = tokenize_row(Row("r:1", {"text": "One two three."}), tokenizer)
    assert tokenizer.decode(tokens_T) == "One two three.<|im_end|>"
    assert mask_T == [False] + [True] * (len(tokens_T) - 1)
    assert tokens_T == tokenize_row(Row("r:1", {"text": "One two three.<|im_end|>"}), tokenizer)[0]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"question": "a", "answer": "b"}, ["answer, question", "`messages`", "`prompt` and `completion`", "`text`"]),
        ({"prompt": "a"}, ["keys: prompt"]),
        ({}, ["keys: none"]),
        ({"text": 5}, ["`text` must be text", "int 5"]),
        ({"text": ""}, ["no token of `text`"]),
        ({"messages": "hi"}, ["`messages` must be a list", "str 'hi'"]),
        ({"messages": []}, ["`messages` must be a list", "list []"]),
        ({"messages": ["hi"]}, ["`messages[0]`", "str 'hi'"]),
        ({"messages": [{"role": "user"}]}, ["`messages[0].content` must be text", "NoneType"]),
        ({"messages": [{"from": "user", "content": "x"}]}, ["`messages[0].role`"]),
        ({"messages": [{"role": "user", "content": [1]}]}, ["`messages[0].content`", "list [1]"]),
        ({"messages": CHAT[:2]}, ["no assistant turn", "system, user"]),
        ({"prompt": CHAT, "completion": [CHAT[1]]}, ["no assistant turn", "roles: user)"]),
        ({"prompt": "a", "completion": ""}, ["no token of `completion`", "empty"]),
        ({"prompt": CHAT[:2], "completion": ""}, ["no token of `completion`", "empty"]),
        ({"prompt": 3, "completion": "a"}, ["`prompt` must be text or a list", "int 3"]),
        ({"prompt": "a", "completion": 3}, ["`completion` must be text or a list", "int 3"]),
    ],
)
def test_bad_rows(tokenizer, values, said):
    check_refused(tokenizer, values, said)


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (None, CHAT, ["chat template", "chat_template.jinja", TINY]),
        (COUNTING, CHAT, ["not prefix-stable", "messages[2]", "{% generation %}"]),
        (END_TOKEN_LAST, CHAT, ["not prefix-stable", "messages[2]"]),
        (CHATML, [CHAT[1], {"role": "assistant", "content": "\n\nFour"}], ["messages[1] merges", "white space"]),
        (REFUSES_SYSTEM, CHAT, ["no system role"]),
    ],
)
def test_bad_templates(tokenizer, template, messages, said):
    tokenizer.chat_template = template
    check_refused(tokenizer, {"messages": messages}, said)


def check_refused(tokenizer, values, said):
    with pytest.raises(UserError) as error:
        tokenize_row(Row("rows.jsonl:7", values), tokenizer)
    message = str(error.value)
    assert message.startswith("rows.jsonl:7: ") and "\n" not in message
    for part in said:
        assert part in message


def test_tokenizer_folders(tmp_path):
    with pytest.raises(UserError, match=r"no such folder.*absent"):
        load_tokenizer(str(tmp_path / "absent"), 2048)
    shutil.copy(f"{TINY}/config.json", tmp_path)  # AutoTokenizer alone would make a tokenizer of one token out of this
    with pytest.raises(UserError, match=r"holds none.*tokenizer.json"):
        load_tokenizer(str(tmp_path), 2048)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="does not load") as error:
        load_tokenizer(str(tmp_path), 2048)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"ids up to 2047.*vocab_size is 2000.*2048"):
        load_tokenizer(TINY, 2000)
