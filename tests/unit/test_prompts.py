"""Rows -> Prompts, and the order of draws."""

import datetime
import json
from collections import Counter
from importlib.resources import files

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.runs.runs import write_rows

from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.dataset import draw_indices, step_indices
from isoloss.engine.rl.prompts import load_prompts
from isoloss.parallel.runtime.errors import UserError

TINY = str(files("isoloss.recipes") / "assets" / "tiny")
ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}]
VERL = {
    "data_source": "gsm8k",
    "prompt": ASK,
    "ability": "math",
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 0},
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY, 2048)


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="train.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        return str(write_rows(path, rows))

    return write


@pytest.fixture
def load(tokenizer):
    def load(*paths, tokenizer=tokenizer, split="train", max_prompt_tokens=256, limit="data.max_length", **options):
        data = DataConfig(**{split: paths}, **options)
        return load_prompts(data, split, tokenizer, max_prompt_tokens=max_prompt_tokens, limit=limit)

    return load


def test_messages_and_text(load, write, tokenizer):
    text = {"prompt": "One, two,", "answer": 3, "level": "easy"}
    path = write({"prompt": ASK, "answer": "2", "data_source": "sums"}, "", {"messages": ASK}, text)
    first, second, third = load(path).prompts
    rendered = tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True)
    assert rendered.endswith("<|im_start|>assistant\n") and tokenizer.decode(first.tokens) == rendered
    assert first.tokens == second.tokens and first.prompt == second.prompt == tuple(ASK)
    assert tokenizer.decode(third.tokens) == third.prompt == "One, two,"
    assert [prompt.id for prompt in load(path).prompts] == ["train.jsonl:1", "train.jsonl:3", "train.jsonl:4"]
    assert [prompt.answer for prompt in load(path).prompts] == ["2", None, 3]
    assert [prompt.source for prompt in load(path).prompts] == ["sums", "train", "train"]
    assert third.extra == {"level": "easy"} and first.extra == second.extra == {}


def test_tools_and_variables_reach_the_template(load, write):
    """The tokens are those of transformers; a reward function still finds the tools."""
    tokenizer = load_tokenizer(TINY, 2048)
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}{{ mood | default('') }}" + tokenizer.chat_template
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    parts = [
        ASK[0],
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 1?"}]},
    ]
    path = write({"prompt": ASK, "tools": tools}, {"messages": ASK}, {"prompt": parts, "tools": json.dumps(tools)})
    for kwargs in ({}, {"mood": "glad"}):
        first, second, third = load(path, tokenizer=tokenizer, template_kwargs=kwargs).prompts
        for prompt, given in ((first, tools), (second, None), (third, tools)):
            expected = tokenizer.apply_chat_template(ASK, tools=given, add_generation_prompt=True, **kwargs)
            assert list(prompt.tokens) == expected["input_ids"] and prompt.prompt == tuple(ASK)
        assert first.extra == {"tools": tools} and second.extra == {}
    with pytest.raises(UserError, match=r"data.template_kwargs.moody is not read"):
        load(path, tokenizer=tokenizer, template_kwargs={"moody": 1})


def test_fingerprint(load, write, tmp_path):
    """Everything that a completion or a reward may depend on, and not where the file lies."""
    row = {"prompt": ASK, "answer": "2", "data_source": "sums", "level": 1}
    first = load(write(row)).fingerprint
    assert load(write(row, name="elsewhere/train.jsonl")).fingerprint == first
    changes = (
        {"prompt": "x"},
        {"answer": 2},
        {"data_source": "gsm"},
        {"level": 2},
        {"level": None},
        {"more": {"a": [1]}},
    )
    found = {load(write(row | change)).fingerprint for change in changes}
    found |= {load(write("", row)).fingerprint, load(write(row, row)).fingerprint}  # another id; one more
    assert len(found | {first}) == 9
    day = pa.Table.from_pylist([{"prompt": "x", "answer": datetime.date(2026, 1, 2)}])
    pq.write_table(day, tmp_path / "train.parquet")
    assert len(load(str(tmp_path / "train.parquet")).fingerprint) == 16


def test_names_of_verl_and_trl(load, write, tmp_path):
    (row,) = load(write(VERL)).prompts
    assert (row.answer, row.source) == ("2", "gsm8k")
    assert row.extra == {key: VERL[key] for key in ("ability", "reward_model", "extra_info")}
    pq.write_table(pa.Table.from_pylist([VERL]), tmp_path / "train.parquet")
    (same,) = load(str(tmp_path / "train.parquet")).prompts
    assert same.id == "train.parquet:1"
    assert (same.tokens, same.prompt, same.answer, dict(same.extra)) == (row.tokens, row.prompt, "2", dict(row.extra))
    rows = [
        {"prompt": "x", "solution": "s"},
        {"prompt": "x", "solution": "s", "reward_model": {"ground_truth": "r"}},
        {"prompt": "x", "solution": "s", "reward_model": {"ground_truth": "r"}, "ground_truth": "g"},
        {"prompt": "x", "solution": "s", "ground_truth": "g", "answer": 0},
    ]
    loaded = load(write(*rows)).prompts
    assert [prompt.answer for prompt in loaded] == ["s", "r", "g", 0]
    assert loaded[3].extra == {"solution": "s", "ground_truth": "g"}


def test_ids_of_files_with_the_same_name(load, write, tmp_path):
    row = {"prompt": "x"}
    one, two, other = write(row, name="a/x.jsonl"), write(row, name="b/x.jsonl"), write(row, name="b/y.jsonl")
    prompts = load(one, two, other).prompts
    assert [prompt.id for prompt in prompts] == [f"{one}:1", f"{two}:1", "y.jsonl:1"]
    assert [prompt.source for prompt in prompts] == ["x", "x", "y"]


def test_overlong(load, write):
    path = write({"prompt": "short"}, {"prompt": "long " * 50})
    lengths = [len(prompt.tokens) for prompt in load(path).prompts]
    limit = lengths[1] - 1
    assert len(load(path, max_prompt_tokens=lengths[1]).prompts) == 2
    kept = load(path, max_prompt_tokens=limit, overlong="drop")
    assert [prompt.id for prompt in kept.prompts] == ["train.jsonl:1"] and kept.dropped == 1
    with pytest.raises(UserError, match=rf"train.jsonl:2: .* {lengths[1]} tokens .*data.max_length={limit}.*drop"):
        load(path, max_prompt_tokens=limit)
    with pytest.raises(UserError, match=r"data.eval: all 2 prompts .*dropped.*rollout.x=0: raise it"):
        load(path, max_prompt_tokens=0, overlong="drop", split="eval", limit="rollout.x")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"sum": "x"}, r"train.jsonl:2: no prompt \(keys: sum\): .*`prompt`.*`messages`"),
        ({"prompt": ""}, "train.jsonl:2: `prompt` is empty"),
        ({"prompt": " \n"}, "train.jsonl:2: `prompt` is empty"),
        ({"prompt": []}, r"train.jsonl:2: `prompt` must be text or a list"),
        ({"prompt": 5}, r"train.jsonl:2: `prompt` must be .*int 5"),
        ({"messages": "x"}, r"train.jsonl:2: `messages` must be a list"),
        ({"prompt": [{"role": "user"}]}, r"train.jsonl:2: `prompt\[0\].content` must be text"),
        ({"prompt": [{"role": "user", "content": " "}]}, "train.jsonl:2: `prompt` has no content"),
        ({"messages": [*ASK, {"role": "assistant", "content": "2"}]}, "train.jsonl:2: `messages` ends with the assist"),
        ({"prompt": "x", "tools": [{"name": "add"}]}, "train.jsonl:2: `tools` reaches the model through"),
        ({"prompt": "x", "data_source": 3}, "train.jsonl:2: `data_source` must be text, not int 3"),
    ],
)
def test_bad_rows(load, write, row, said):
    with pytest.raises(UserError, match=said) as error:
        load(write({"prompt": "x"}, row))
    assert "\n" not in str(error.value)


def test_bad_files(load, write):
    with pytest.raises(UserError, match=r"data.train: no rows in .*train.jsonl"):
        load(write(""))
    with pytest.raises(UserError, match=r"data.eval: no such file: .*trian.jsonl; did you mean .*train.jsonl"):
        load(write({"prompt": "x"}).replace("train.jsonl", "trian.jsonl"), split="eval")


def test_messages_without_a_chat_template(load, write):
    plain = load_tokenizer(TINY, 2048)
    plain.chat_template = None
    assert len(load(write({"prompt": "x"}), tokenizer=plain).prompts) == 1
    with pytest.raises(UserError, match=r"train.jsonl:1: messages need a chat template.*`prompt` as plain text"):
        load(write({"prompt": ASK}), tokenizer=plain)


def test_order():
    def draws(start: int, count: int, seed: int = 3) -> list[int]:
        return draw_indices(7, start, count, seed).tolist()

    stream = draws(0, 21)
    assert all(Counter(stream[i : i + 7]) == Counter(range(7)) for i in (0, 7, 14))
    assert stream[:7] != stream[7:14]
    assert draws(5, 11) == stream[5:16]
    assert draws(0, 21, seed=4) != stream
    assert draws(8, 4) == step_indices(7, 2, 4, 3).tolist()
    with pytest.raises(ValueError, match="count=0"):
        draws(0, 0)
