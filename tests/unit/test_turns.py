"""The assistant's turns in the chat templates that are published: the tokens are transformers', and the targets are
those that the twins of TRL mark, whose blocks `{% generation %}` transformers reads."""

import importlib.util
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from isoloss.engine.data.chat import tokenize_row
from isoloss.engine.data.rows import Row, unread_rows
from isoloss.engine.data.turn_ends import turn_ends
from isoloss.parallel.runtime.errors import UserError

SPEC = importlib.util.find_spec("trl")
assert SPEC is not None and SPEC.origin is not None, "TRL's templates are missing: make install"
FOLDER = Path(SPEC.origin).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))

SPECIAL = re.compile(
    r"<\|[^|<> ]{1,40}\|?>|<｜[^｜]{1,40}｜>|<(?:start|end)_of_turn>|<(?:turn|tool_call|tool_response|channel)\|>|<bos>"
    r"|<eos>|</?s>|\[/?INST\]|\[gMASK\]|<sop>|<end_of_utterance>"
)
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
BEGINS = ("<|begin_of_text|>", "<bos>", "<s>", "<｜begin▁of▁sentence｜>", "<BOS_TOKEN>", "<|startoftext|>")
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>", "deepseek": "<｜end▁of▁sentence｜>", "gemma4": "<turn|>", "diffusion": "<turn|>",
    "gemma": "<end_of_turn>", "glm": "<|endoftext|>", "gptoss": "<|return|>", "idefics": "<end_of_utterance>",
    "smolvlm": "<end_of_utterance>", "llama": "<|eot_id|>", "llava": "</s>", "phi": "<|endoftext|>",
}  # fmt: skip


def tokenizer_of(template: str, name: str, special_of: str = "") -> PreTrainedTokenizerFast:
    """Bytes, two line breaks as one token, and what looks like a special token in the template."""
    end = next((end for family, end in ENDS.items() if name.startswith(family)), "<|im_end|>")
    special = sorted({*SPECIAL.findall(template + special_of), end})
    begin = next((token for token in BEGINS if token in special), "<bos>")
    vocab = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab["ĊĊ"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in dict.fromkeys([*special, begin])])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in NOT_SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=begin, pad_token=special[0])
    fast.chat_template = template
    return fast


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def says(text: str, **more: object) -> dict:
    return {"role": "assistant", "content": text, **more}


def call(number: int, **arguments: object) -> dict:
    return {"type": "function", "id": f"call0000{number}", "function": {"name": "add", "arguments": arguments}}


def result(number: int, text: str) -> dict:
    return {"role": "tool", "name": "add", "tool_call_id": f"call0000{number}", "content": text}


THOUGHT = "<think>\n{}\n</think>\n\n"
PARAMETERS = {"a": {"type": "integer", "description": "n"}, "s": {"type": "string", "description": "t"}}
SCHEMA = {"type": "object", "properties": PARAMETERS, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}]
ROWS = {
    "one turn": {"messages": [user("Greetings"), says("one")]},
    "three turns": {
        "messages": [user("Greetings"), says("one"), user("Go on"), says("<two>"), user("And\n\nso on"),
                     says("three\n\nlines")]
    },
    "thoughts": {
        "messages": [user("Greetings"), says("one", reasoning_content="thought 1"), user("Go on"),
                     says("two", reasoning_content="thought 2")]
    },
    "thoughts in the text": {
        "messages": [user("Greetings"), says(THOUGHT.format("thought 1") + "one"), user("Go on"),
                     says(THOUGHT.format("thought 2") + "two")]
    },
    "tools": {
        "messages": [user("Greetings"), says("", tool_calls=[call(1, a=1, s="x")]), result(1, "5"), says("five"),
                     user("Go on"), says("six")],
        "tools": TOOLS,
    },
    "parallel tool results": {
        "messages": [user("Greetings"), says("", tool_calls=[call(1, a=1), call(2, s="y")]), result(1, "5"),
                     result(2, "6"), says("eleven")],
        "tools": TOOLS,
    },
}  # fmt: skip
# What the twins count as said, and the prompt holds already; and thoughts that they keep where the template drops them.
BEFORE = re.compile(
    r"(\n|<\|start\|>assistant|<｜Assistant｜>|<｜tool▁outputs▁end｜>)?"
    r"(\n?<think>(\n?thought \d\n?|\n*)(</think>\n*)?)?"
)
# What follows the end of a turn: a line break, the end of the whole (Phi), the begin of the answer to a call (Gemma 4).
AFTER = re.compile(r"\n?(<\|endoftext\|>|<\|tool_response>)?\n?$")
PLAIN = AddedToken("", special=False)
# Rows that a template cannot render, with a part of the error. Templates of vision models take content as a list.
NO_THOUGHTS, NO_TOOLS = "`messages[1].reasoning_content` is not read", "`messages[1].tool_calls` is not read"
WITHOUT_TOOLS = ("cohere", "cohere2", "gemma", "gemma3", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl")
WITHOUT_THOUGHTS = (*WITHOUT_TOOLS, "deepseek_r1_distill", "deepseekv3", "gemma4_v2", "lfm2_v2", "llama3_1", "llama3_2",
                    "qwen2_5", "qwen3_instruct_2507", "qwen3_vl")  # fmt: skip
IN_PARTS = {
    "idefics3": "does not write the message 0",
    "smolvlm": "does not write the message 0",
    "llava_next": "refuses these",
}
REFUSED = (
    {(name, kind): why for name, why in IN_PARTS.items() for kind in ROWS}
    | {(name, "thoughts"): NO_THOUGHTS for name in (*WITHOUT_THOUGHTS, *IN_PARTS)}
    | {(name, kind): NO_TOOLS for name in (*WITHOUT_TOOLS, *IN_PARTS) for kind in ("tools", "parallel tool results")}
    | {(name, "parallel tool results"): "only supports single tool-calls" for name in ("llama3_1", "llama3_2")}
    | {("deepseek_r1_distill", kind): "does not write all" for kind in ("tools", "parallel tool results")}
)


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> list[tuple[str, Row, Row]]:
    """The name of each, and the row as it is read from JSON Lines and from Parquet."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS.values()))
    pq.write_table(pa.Table.from_pylist([{"tools": None} | row for row in ROWS.values()]), folder / "rows.parquet")
    lines, parquet = (unread_rows([str(folder / name)], "data.train") for name in ("rows.jsonl", "rows.parquet"))
    return [(name, line.read(), row.read()) for name, line, row in zip(ROWS, lines, parquet, strict=True)]


def runs(tokens_T: list[int], mask_T: list[bool]) -> list[list[int]]:
    found, before = [], False
    for token, target in zip(tokens_T, mask_T):
        if target:
            found = [*found[:-1], [*found[-1], token]] if before else [*found, [token]]
        before = target
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_published_template_is_trained_as_its_marked_twin(name, rows):
    template = (FOLDER / f"{name}.jinja").read_text()
    twin = FOLDER / f"{name}_training.jinja"
    tokenizer = tokenizer_of(template, name)
    for kind, line, parquet in rows:
        if (name, kind) in REFUSED:
            with pytest.raises(UserError, match=re.escape(REFUSED[name, kind])):
                tokenize_row(line, tokenizer)
            continue
        tokens_T, mask_T = tokenize_row(line, tokenizer)
        assert tokenize_row(parquet, tokenizer) == (tokens_T, mask_T), kind
        check_generically(kind, tokenizer, tokens_T, mask_T)
        if twin.is_file():
            marked = tokenizer_of(twin.read_text(), name, special_of=template)
            out = marked.apply_chat_template(
                line.values["messages"],
                tools=line.values.get("tools"),
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            theirs = [AFTER.sub("", marked.decode(run)) for run in runs(out["input_ids"], out["assistant_masks"])]
            # DiffusionGemma's prompt has no header where an answer follows a tool's.
            ours = [
                AFTER.sub("", tokenizer.decode(run)).removeprefix("<|turn>model\n") for run in runs(tokens_T, mask_T)
            ]
            assert len(ours) == len(theirs), (kind, ours, theirs)
            for own, other in zip(ours, theirs):
                assert other.endswith(own) and BEFORE.fullmatch(other.removesuffix(own)), (kind, own, other)


def check_generically(kind, tokenizer, tokens_T, mask_T) -> None:
    """Tokens are transformers', but for an end that the template leaves to the next turn; every turn is one run of
    targets and ends with a special token, the last with one that stops generation; nothing of others is a target."""
    row = ROWS[kind]
    messages = row["messages"]
    found = runs(tokens_T, mask_T)
    spoken = [message for message in messages if message["role"] == "assistant"]
    assert len(found) == len(spoken), (kind, found)
    stops = set(turn_ends(tokenizer).values())
    for place, (run, message) in enumerate(zip(found, spoken)):
        text = tokenizer.decode(run)
        assert message["content"].rpartition("</think>")[2].strip() in text
        assert all(f'"{value}"' in text or str(value) in text for c in message.get("tool_calls", ())
                   for value in c["function"]["arguments"].values()), (kind, text)  # fmt: skip
        ends = [token for token in run if token in stops or tokenizer.added_tokens_decoder.get(token, PLAIN).special]
        assert ends and not tokenizer.decode(run[run.index(ends[-1]) + 1 :]).strip(), (kind, text)
        if place == len(spoken) - 1:
            assert ends[-1] in stops, (kind, text)
        assert not any(other["content"] in text for other in messages if other["role"] == "user"), (kind, text)
    begin = tokenizer.bos_token_id
    assert tokens_T.count(begin) <= 1
