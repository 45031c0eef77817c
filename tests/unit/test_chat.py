"""Loss masks: what is a target, read back as text."""

import json
import shutil
from importlib.resources import files

import pytest

from isoloss.engine.data.chat import load_tokenizer, tokenize_row
from isoloss.engine.data.chat_template import Template, check_template_kwargs, render
from isoloss.engine.data.rows import Row
from isoloss.engine.data.turns import maps_characters
from isoloss.parallel.runtime.errors import UserError

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

# Tools in the system turn, calls and answers in turns of their own; like Qwen3's: empty thoughts while a turn is the
# last one, and none of them (`thoughts` set to false) where the assistant starts to speak.
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}(BEGIN)"
    "{% if loop.last %}{{ '<think>\n\n</think>' }}{% endif %}{{ m.get('content', '') }}"
    "{% for c in m.get('tool_calls', []) %}{{ '<call>' + c | tojson + '</call>' }}{% endfor %}{{ '<|im_end|>' }}(END)"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if thoughts is defined and thoughts is false %}{{ '<think>\n\n</think>' }}{% endif %}{% endif %}"
)
PLAIN_TOOLS = TOOLS.replace("(BEGIN)", "").replace("(END)", "")
MARKED_TOOLS = TOOLS.replace("(BEGIN)", "{% generation %}").replace("(END)", "{% endgeneration %}")
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALLING = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 2}}]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "Four."},
]

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


def targets(tokenizer, values: dict, **template_kwargs) -> list[str]:
    """The runs of targets of a row, decoded."""
    tokens_T, mask_T = tokenize_row(Row("rows.jsonl:7", values), tokenizer, template_kwargs)
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


@pytest.mark.parametrize("template", (PLAIN_TOOLS, MARKED_TOOLS), ids=("prefixes", "marks"))
@pytest.mark.parametrize(
    "tools",
    ([ADD], [ADD, ADD], json.dumps([ADD]), [json.dumps(ADD), ADD], [], None),
    ids=("1", "2", "text", "texts", "0", "none"),
)
def test_tools_reach_the_template(tokenizer, template, tools):
    """Tokens and mask are those of transformers, with the same tools, on the template that marks its turns."""
    tokenizer.chat_template = MARKED_TOOLS
    given = json.loads(tools) if isinstance(tools, str) else tools
    given = [json.loads(tool) if isinstance(tool, str) else tool for tool in given] if given else given
    expected = tokenizer.apply_chat_template(CALLING, tools=given, return_dict=True, return_assistant_tokens_mask=True)
    tokenizer.chat_template = template
    row = {"messages": CALLING} if tools is None else {"messages": CALLING, "tools": tools}
    tokens_T, mask_T = tokenize_row(Row("rows.jsonl:7", row), tokenizer)
    assert tokens_T == expected["input_ids"] and ("Tools:" in tokenizer.decode(tokens_T)) == bool(given)
    assert targets(tokenizer, row) == [
        '<call>{"name": "add", "arguments": {"a": 2}}</call><|im_end|>',
        "<think>\n\n</think>Four.<|im_end|>",
    ]
    assert [int(m) for m in mask_T] == list(expected["assistant_masks"])


def test_tools_with_prompt_and_completion(tokenizer):
    tokenizer.chat_template = PLAIN_TOOLS
    row = {"prompt": CALLING[:3], "completion": CALLING[3:], "tools": [ADD]}
    assert targets(tokenizer, row) == ["<think>\n\n</think>Four.<|im_end|>"]
    tokens_T, _ = tokenize_row(Row("r:1", row), tokenizer)
    assert tokens_T == tokenizer.apply_chat_template(CALLING, tools=[ADD])["input_ids"]


def test_variables_reach_the_template(tokenizer):
    """What generation begins with is no target; turns that the template renders without it are whole."""
    tokenizer.chat_template = PLAIN_TOOLS
    chat = [CHAT[1], CHAT[2], CHAT[3], {"role": "assistant", "content": "Six."}]
    assert targets(tokenizer, {"messages": chat}) == ["Four.<|im_end|>", "<think>\n\n</think>Six.<|im_end|>"]
    assert targets(tokenizer, {"messages": chat}, thoughts=False) == ["Four.<|im_end|>", "Six.<|im_end|>"]
    last = tokenizer.apply_chat_template(chat[:3], add_generation_prompt=True, thoughts=False)["input_ids"]
    tokens_T, mask_T = tokenize_row(Row("r:1", {"messages": chat}), tokenizer, {"thoughts": False})
    assert tokens_T[: len(last)] == last and mask_T.index(True, len(last) - 1) == len(last)
    assert tokens_T == tokenizer.apply_chat_template(chat, thoughts=False)["input_ids"]


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"thought": False}, "data.template_kwargs.thought is not read by the chat template"),
        ({"tokenize": False}, "data.template_kwargs.tokenize is not for the user"),
        ({"tools": []}, "data.template_kwargs.tools is not for the user"),
    ],
)
def test_bad_variables(tokenizer, kwargs, said):
    tokenizer.chat_template = PLAIN_TOOLS
    check_template_kwargs({"thoughts": True}, tokenizer)
    with pytest.raises(UserError, match=said):
        check_template_kwargs(kwargs, tokenizer)


def test_content_in_parts_of_text(tokenizer):
    def parts(*texts):
        return [{"type": "text", "text": text} for text in texts]

    chat = [
        {"role": "user", "content": parts("What is ", "2 + 2?")},
        {"role": "assistant", "content": parts("Fo", "ur.")},
    ]
    whole = Row("r:1", {"messages": CHAT[1:3]})
    assert tokenize_row(Row("r:1", {"messages": chat}), tokenizer) == tokenize_row(whole, tokenizer)
    split = Row("r:1", {"prompt": chat[:1], "completion": chat[1:]})
    assert tokenize_row(split, tokenizer) == tokenize_row(whole, tokenizer)


@pytest.mark.parametrize(
    ("template", "content", "expected", "kwargs"),
    [
        (PLAIN_TOOLS.replace("</think>", "</think>\\n\\n"), "Four.", "Four.<|im_end|>", {"thoughts": False}),
        (CHATML, "\n\nFour.", "\n\n\nFour.<|im_end|>", {}),
    ],
    ids=("by the template", "by the message"),
)
def test_a_token_of_prompt_and_turn_is_a_target(tokenizer, template, content, expected, kwargs):
    """The prompt ends within a token of the conversation: the model is to say what it has of it."""
    tokenizer.chat_template = template
    chat = [CHAT[1], {"role": "assistant", "content": content}]
    assert targets(tokenizer, {"messages": chat}, **kwargs) == [expected]


def test_template_without_end_token(tokenizer):
    tokenizer.chat_template = NO_END_TOKEN
    check_refused(
        tokenizer, {"messages": CHAT[1:3]}, ["with no special token", "teach the model to stop", "<|im_end|>"]
    )


def test_tokenizer_that_trims_offsets(tokenizer, tmp_path):
    """White space at the border of a turn: transformers' own mask goes wrong there."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(f"{TINY}/{name}", tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    trimming = load_tokenizer(str(tmp_path), 2048)
    assert maps_characters(tokenizer) and maps_characters(trimming)
    assert trimming("a  b\n c")["input_ids"] == tokenizer("a  b\n c")["input_ids"]
    chat = [CHAT[1], {"role": "assistant", "content": " Four."}, CHAT[3], CHAT[4]]
    assert targets(trimming, {"messages": chat}) == [" Four.<|im_end|>", "Six,\nit is.\n<|im_end|>"]


def with_front(tmp_path, token: str) -> str:
    """The folder of a tokenizer that puts the token before every text."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{TINY}/{name}", tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    (number,) = (added["id"] for added in spec["added_tokens"] if added["content"] == token)
    known = {token: {"id": token, "ids": [number], "tokens": [token]}}
    template = {"single": [first, text[0]], "pair": [first, *text], "special_tokens": known}
    spec["post_processor"] = {"type": "TemplateProcessing", **template}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    return str(tmp_path)


def test_a_beginning_of_sequence_is_not_added_to_what_a_template_renders(tokenizer, tmp_path):
    """Llama's tokenizer puts one before every text, and its template writes one: a conversation has one, not two."""
    adding = load_tokenizer(with_front(tmp_path, "<|im_start|>"), 2048)
    number = adding.convert_tokens_to_ids("<|im_start|>")
    assert adding("One")["input_ids"][0] == number
    adding.chat_template = tokenizer.chat_template = CHATML
    row = Row("r:1", {"messages": CHAT})
    assert tokenize_row(row, adding) == tokenize_row(row, tokenizer)
    assert tokenize_row(row, adding)[0][:2].count(number) == 1
    assert tokenize_row(Row("r:1", {"text": "One"}), adding)[0][0] == number


def test_prompt_and_completion_texts(tokenizer):
    row = {"prompt": "The capital of France is", "completion": " Paris."}
    assert targets(tokenizer, row) == [" Paris.<|im_end|>"]
    tokens_T, _ = tokenize_row(Row("r:1", row), tokenizer)
    assert tokenizer.decode(tokens_T) == "The capital of France is Paris.<|im_end|>"
    assert targets(tokenizer, {"prompt": "", "completion": "Paris, I say."})[0].endswith("I say.<|im_end|>")


def test_no_end_is_added_where_the_tokenizer_has_none(tokenizer):
    tokenizer.eos_token = None
    check_refused(
        tokenizer, {"prompt": "One,", "completion": " two"}, ["a completion needs a token that ends it", TINY]
    )
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
        ({"messages": [{"role": "user", "content": [1]}]}, ["`messages[0].content[0]`", "int 1", "part of text"]),
        ({"messages": [{"role": "user", "content": []}]}, ["`messages[0].content` must be text", "list []"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "url": "b"}]}]},
            ["`messages[0].content[1]`", "type 'image'", "text alone"],
        ),
        ({"messages": CHAT, "tools": {"name": "add"}}, ["`tools` must be a list", "dict"]),
        ({"messages": CHAT, "tools": ["add"]}, ["`tools[0]` is not JSON", "fix it"]),
        ({"messages": CHAT, "tools": [ADD, "7"]}, ["`tools[1]` must be a JSON schema of a function, not int 7"]),
        ({"messages": CHAT, "tools": "[{"}, ["`tools` is not JSON"]),
        ({"text": "a b", "tools": [ADD]}, ["`tools` reaches the model through the chat template", "`text`"]),
        ({"prompt": "a", "completion": "b", "tools": [ADD]}, ["`tools` reaches", "`prompt`"]),
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


@pytest.mark.parametrize(
    ("template", "said"),
    (
        (
            [{"name": "tool_use", "template": CHATML}],
            "^rows:1: the tokenizer .* has no chat template for this row .*default",
        ),
        ({"tool_use": CHATML}, r"^rows:1: the tokenizer .* has no chat template for this row"),
        (5, "a chat template must be text, not int 5"),
        ([{"name": "default", "template": None}], "a chat template must be text, not NoneType"),
        ([7], "does not load"),
        (
            "{% for m in messages %}{{ m.role }",
            r"^rows:1: the chat template of .*/model/tokenizer_config.json is not one .* in its line 1.: fix",
        ),
        ("{{ messages }}\n{% endif %}", r"^rows:1: the chat template of .* is not one \(.* in its line 2\): fix it"),
    ),
)
def test_templates_of_a_folder_that_are_none(template, said, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("chat_template.jinja"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    values = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(UserError, match=said) as error:
        tokenize_row(Row("rows:1", values), load_tokenizer(str(folder), 2048))
    assert "\n" not in str(error.value)


def test_a_template_in_a_file_of_its_own_is_named(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.role }")
    values = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(
        UserError, match=r"the chat template of .*/model/chat_template.jinja is not one .* in its line 2"
    ):
        tokenize_row(Row("rows:1", values), load_tokenizer(str(folder), 2048))


def test_only_the_template_that_a_row_needs_has_to_be_there(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("chat_template.jinja"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    templates = [{"name": "tool_use", "template": PLAIN_TOOLS}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": templates}))
    tokenizer = load_tokenizer(str(folder), 2048)
    assert targets(tokenizer, {"messages": CALLING, "tools": [ADD]})


@pytest.mark.parametrize("name", ("tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"))
def test_a_pointer_of_git_lfs_is_no_template_and_no_vocabulary(name, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n")
    with pytest.raises(UserError, match=rf"^tokenizer: {folder}/{name} is a pointer of Git LFS.*; run git lfs pull"):
        load_tokenizer(str(folder), 2048)


def test_a_vocabulary_without_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.get_vocab", lambda self: {})
    with pytest.raises(UserError, match=r"^tokenizer: .* has no token"):
        load_tokenizer(TINY, 2048)


MARKS_WITHOUT_END = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("template", [None, CHATML, MARKS_WITHOUT_END], ids=("marks", "no marks", "marks without end"))
def test_turns_that_are_not_learned(tokenizer, template):
    tokenizer.chat_template = template or tokenizer.chat_template
    wrong = CHAT[2] | {"weight": 0}
    assert targets(tokenizer, {"messages": [*CHAT[:2], wrong, *CHAT[3:]]}) == ["Six,\nit is.\n<|im_end|>"]
    empty = {"role": "assistant", "content": ""}
    assert targets(tokenizer, {"messages": [*CHAT[:2], empty, *CHAT[3:]]}) == ["Six,\nit is.\n<|im_end|>"]
    assert targets(tokenizer, {"messages": [*CHAT[:4], CHAT[4] | {"train": False}]}) == ["Four.<|im_end|>"]
    row = {"prompt": CHAT[:2], "completion": [wrong, *CHAT[3:]]}
    assert targets(tokenizer, row) == ["Six,\nit is.\n<|im_end|>"]
    for last in (wrong, empty):
        check_refused(tokenizer, {"messages": [*CHAT[:2], last]}, ["no token of `messages` is a target"])


def test_marks_that_leave_the_end_out(tokenizer):
    tokenizer.chat_template = MARKS_WITHOUT_END
    assert targets(tokenizer, {"messages": CHAT}) == ["Four.<|im_end|>", "Six,\nit is.\n<|im_end|>"]
    tokenizer.chat_template = MARKS_WITHOUT_END.replace("{% endgeneration %}", "{% endgeneration %}{{ ' ' }}")
    check_refused(tokenizer, {"messages": CHAT}, ["out of its {% generation %} marks"])


@pytest.mark.parametrize("template", [None, CHATML], ids=("marks", "no marks"))
@pytest.mark.parametrize("role", ["system", "tool", "user"])
def test_a_message_that_the_template_passes_over_is_refused(tokenizer, template, role):
    template = template or tokenizer.chat_template
    tokenizer.chat_template = (
        f"{{% set messages = messages | rejectattr('role', 'equalto', '{role}') | list %}}{template}"
    )
    chat = [CHAT[1], CHAT[2], {"role": role, "content": "Say What."}, CHAT[2]]
    said = f"the chat template does not write the message {0 if role == 'user' else 2} of the role {role}"
    check_refused(tokenizer, {"messages": chat}, [said])
    with pytest.raises(UserError, match=said):
        render(chat[:3], Template(tokenizer, "rows.jsonl:7", None, {}), prompt=True)
    tokenizer.chat_template = template.replace("m['content']", "(m['content'] | tojson)").replace(
        "message['content']", "(message['content'] | tojson)"
    )
    quoted = {"role": "system", "content": 'Say "4",\n\tno more.'}
    render([quoted, CHAT[1]], Template(tokenizer, "rows.jsonl:7", None, {}), prompt=True)


@pytest.mark.parametrize("template", [None, CHATML], ids=("marks", "no marks"))
def test_the_assistant_speaks_first(tokenizer, template):
    tokenizer.chat_template = template or tokenizer.chat_template
    chat = [{"role": "assistant", "content": "Who is there?"}, *CHAT[1:3]]
    assert targets(tokenizer, {"messages": chat}) == ["Who is there?<|im_end|>", "Four.<|im_end|>"]


def test_what_stands_in_a_message_is_no_border(tokenizer):
    """Content that looks like the template's own, and words that the search for its end could take for others."""
    tokenizer.chat_template = CHATML
    inner = "a<|im_end|>\n<|im_start|>assistant\nb Quartz0q1z"
    chat = [{"role": "user", "content": inner}, {"role": "assistant", "content": inner}, *CHAT[1:3]]
    assert targets(tokenizer, {"messages": chat}) == [inner + "<|im_end|>", "Four.<|im_end|>"]


def test_a_long_conversation_takes_as_many_renderings_as_a_short_one(tokenizer, monkeypatch):
    tokenizer.chat_template = THINKING
    rendered = []
    render = type(tokenizer).apply_chat_template
    monkeypatch.setattr(
        type(tokenizer), "apply_chat_template", lambda *args, **kwargs: rendered.append(1) or render(*args, **kwargs)
    )
    counts = []
    for pairs in (2, 3, 50):  # the first finds out how the template ends turns
        rendered.clear()
        found = targets(tokenizer, {"messages": CHAT[1:3] * pairs})
        assert found == ["Four.<|im_end|>"] * (pairs - 1) + ["<think>\n\n</think>\n\nFour.<|im_end|>"]
        counts.append(len(rendered))
    assert counts[1] == counts[2] <= 6


def test_a_text_that_was_rendered_beforehand_begins_once(tokenizer, tmp_path):
    """Llama's tokenizer puts a token before every text."""
    adding = load_tokenizer(with_front(tmp_path, "<|im_start|>"), 2048)
    text = "<|im_start|>user\nOne"
    front = adding.convert_tokens_to_ids("<|im_start|>")
    for row in ({"text": text}, {"prompt": text, "completion": " two"}):
        tokens_T, _ = tokenize_row(Row("r:1", row), adding)
        assert tokens_T[:2].count(front) == 1 and adding.decode(tokens_T).startswith(text)
    assert tokenize_row(Row("r:1", {"text": "<|im_start|>" + text}), adding)[0][:3].count(front) == 2, "the text's own"


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
