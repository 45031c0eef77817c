"""Rows that can be trained on and may not be what was meant: counted, and told at the start."""

import dataclasses
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.runs.runs import write_rows

from isoloss.engine.config.data_config import WeightedFile
from isoloss.engine.config.schema import BatchConfig, Config, DataConfig, ModelConfig, TrainConfig
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.dataset import load_dataset
from isoloss.engine.data.mixture import Mixture
from isoloss.engine.data.remarks import digest, remark_lines, repeat_lines
from isoloss.engine.rl.config import RLConfig, RLDataConfig
from isoloss.engine.rl.prompts import load_prompts
from isoloss.engine.rl.report import banner
from isoloss.engine.sft import loop

TINY = str(files("isoloss.recipes") / "assets" / "tiny")
ASKED = {"role": "user", "content": "Hi"}
THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content | trim }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def says(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | more


@pytest.fixture
def load(tmp_path):
    def load(*rows, split="train", tokenizer=TINY):
        path = write_rows(tmp_path / f"{split}.jsonl", rows)
        data = DataConfig(**{split: (str(path),), "max_length": 512})
        return load_dataset(data, split, tokenizer, vocab_size=2048, cache_dir=tmp_path / "cache")

    return load


def test_forms_are_counted_and_told_where_they_differ(load):
    text, talk, pair = {"text": "a b"}, {"messages": [ASKED, says("Yes")]}, {"prompt": "a", "completion": "b"}
    for _ in range(2):  # tokenized, then from the cache
        stats = load(text, talk, pair, text).stats
        assert stats.forms == {"text": 2, "messages": 1, "prompt + completion": 1}
    assert remark_lines("data.train", stats.forms, {}) == [
        "data.train: several forms: 2 rows of text, 1 rows of messages, 1 rows of prompt + completion"
    ]
    assert remark_lines("data.eval", {"text": 4}, {}) == []


@pytest.mark.parametrize(
    ("turns", "empty"),
    [
        ([ASKED, says("Yes")], 0),
        ([ASKED, says(""), ASKED, says("Yes")], 1),
        ([ASKED, says(" \n"), ASKED, says("Yes", weight=1)], 1),
        ([ASKED, says([{"type": "text", "text": ""}]), ASKED, says("Yes")], 1),
        ([{"role": "user", "content": ""}, says("Yes")], 0),
    ],
)
def test_rows_with_an_empty_turn_are_counted(load, turns, empty):
    rows = [{"messages": turns}, {"prompt": [ASKED], "completion": turns[1:]}, {"text": "a b"}]
    stats = load(*rows).stats
    assert stats.remarks.get("empty_turn", 0) == 2 * empty
    assert len(remark_lines("data.train", {}, stats.remarks)) == empty


@pytest.mark.parametrize(
    ("turns", "lost"),
    [
        ([ASKED, says("Yes", reasoning_content="Why not?")], 0),
        ([ASKED, says("Yes", thinking=" Why  not?\n\nYe\u0301s.")], 0),
        ([ASKED, says("No", reasoning_content="Why so?"), ASKED, says("Yes")], 1),
        ([ASKED, says("No", reasoning_content="Why so?"), ASKED, says("Yes", reasoning_content="Why?")], 1),
        ([ASKED, says("Yes", reasoning_content="")], 0),
    ],
)
def test_rows_whose_thoughts_the_template_leaves_out_are_counted(load, tmp_path, turns, lost):
    """THOUGHTS writes those of the last message, trimmed, as templates do that drop earlier thoughts."""
    tokenizer = load_tokenizer(TINY, 2048)
    tokenizer.chat_template = THOUGHTS
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    stats = load({"messages": turns}, {"text": "a b"}, tokenizer=str(tmp_path / "tokenizer")).stats
    assert stats.remarks == ({"lost_thought": 1} if lost else {})
    lines = remark_lines("data.train", {}, stats.remarks)
    assert [line[:48] for line in lines] == ["data.train: 1 rows have thoughts (reasoning_cont"] * lost


def digests(*rows: int) -> list[bytes]:
    return [digest(np.arange(row)) for row in rows]


@pytest.mark.parametrize(
    ("train", "held_out", "taken", "lines"),
    [
        (digests(1, 2, 3), digests(4, 5), 3, []),
        (digests(*range(1, 121)), [], 1000, ["data: a step takes every row 8.3 times: batch.global_size=1,000 is "
                                            "more than the 120 rows of data.train"]),
        (digests(1, 2, 1, 1), [], 4, ["data: 2 of 4 rows of data.train repeat an earlier one"]),
        (digests(1, 2, 2), digests(2, 2, 3), 1, ["data: 1 of 3 rows of data.train repeat an earlier one",
            "data: 2 of 3 rows of data.eval are in data.train as well: evaluations are not of what the model has not "
            "seen"]),
    ],
)  # fmt: skip
def test_rows_that_are_seen_more_often_than_their_number_says(train, held_out, taken, lines):
    assert repeat_lines(train, held_out, taken, "row", "step") == lines


def test_the_same_tokens_have_the_same_digest_wherever_they_stand():
    whole = np.arange(20, dtype=np.int32)
    assert digest(whole[5:9]) == digest(np.arange(5, 9)) != digest(np.arange(5, 10))


def test_both_recipes_tell_them(load, tmp_path, one_rank):
    rows = [{"prompt": f"a {n}", "completion": "b"} for n in (1, 2, 2)]
    train, held_out = load(*rows, {"text": "a b"}), load(*rows[:1], split="eval")
    lines = loop.odd_rows(Config(ModelConfig(TINY), batch=BatchConfig(8)), loop.RunData(train, held_out, 1, (), None))
    begins = ["data: a step takes every row 2.0 times", "data: 1 of 4 rows", "data: 1 of 1 rows of data.eval"]
    assert [line[: len(begin)] for line, begin in zip(lines, begins)] == begins
    assert lines[3:] == ["data.train: several forms: 3 rows of prompt + completion, 1 rows of text"]

    paths = str(tmp_path / "train.jsonl"), str(tmp_path / "eval.jsonl")
    write_rows(tmp_path / "train.jsonl", rows)
    data = RLDataConfig((paths[0],), (paths[1],))
    tokenizer = load_tokenizer(TINY, 2048)
    prompts = [load_prompts(data, split, tokenizer, max_prompt_tokens=99) for split in ("train", "eval")]
    config = RLConfig(ModelConfig(TINY), data=data, batch=BatchConfig(7))
    rl_data: Any = SimpleNamespace(
        train=prompts[0], eval=prompts[1], rejects=lambda _: SimpleNamespace(lines=lambda _: [])
    )
    run: Any = SimpleNamespace(output_dir="here", total_steps=1, banner=lambda weights, lines, work: lines)
    lines = banner(config, rl_data, run)
    begins = ["data: a batch takes every prompt 2.3 times", "data: 1 of 3 prompts", "data: 1 of 1 prompts of data.eval"]
    assert [line[: len(begin)] for line, begin in zip(lines[1:4], begins)] == begins
    assert lines[4].endswith("7 prompts x 8 completions -> 1 mini-batch of 56 x 1 epoch")


def test_a_source_of_a_mixture_that_a_step_takes_several_times():
    """By hand: 3/4 of 40 is 30 of 10 rows, 1/4 is 10 of 100."""
    mixture = Mixture(("a.jsonl", "b.jsonl"), (10, 100), (3.0, 1.0))
    lines = repeat_lines(digests(*range(110)), [], 40, "row", "step", mixture)
    assert lines == [
        "data: a step takes every row of a.jsonl 3.0 times: 75.00% of batch.global_size=40 is more than its 10 rows"
    ]
    assert repeat_lines(digests(*range(110)), [], 13, "row", "step", mixture) == []
    one = repeat_lines(digests(*range(110)), [], 440, "row", "step", mixture)
    assert [line[:48] for line in one] == [
        "data: a step takes every row of a.jsonl 33.0 tim", "data: a step takes every row of b.jsonl 1.1 time",
    ]  # fmt: skip


def test_both_recipes_tell_them_of_a_mixture(load, tmp_path, one_rank):
    """Seven of two files: the one that has most of the weight repeats, the other does not."""
    rows = [{"prompt": f"a {n}", "completion": "b"} for n in range(12)]
    write_rows(tmp_path / "a.jsonl", rows[:2])
    write_rows(tmp_path / "b.jsonl", rows[2:])
    files = tuple(WeightedFile(str(tmp_path / name), weight) for name, weight in (("a.jsonl", 3.0), ("b.jsonl", 1.0)))
    mixture = Mixture(tuple(file.path for file in files), (2, 10), (3.0, 1.0))
    train = dataclasses.replace(load(*rows), mixture=mixture)
    lines = loop.odd_rows(Config(ModelConfig(TINY), batch=BatchConfig(8)), loop.RunData(train, None, 1, (), None))
    assert lines[0].startswith(f"data: a step takes every row of {tmp_path}/a.jsonl 3.0 times: 75.00% of")
    assert not any("step takes" in line for line in lines[1:])

    data = RLDataConfig(files)
    prompts = load_prompts(data, "train", load_tokenizer(TINY, 2048), max_prompt_tokens=99)
    config = RLConfig(ModelConfig(TINY), data=data, batch=BatchConfig(8), train=TrainConfig(steps=1))
    rl_data: Any = SimpleNamespace(train=prompts, eval=None, rejects=lambda _: SimpleNamespace(lines=lambda _: []))
    run: Any = SimpleNamespace(output_dir="here", total_steps=1, banner=lambda weights, lines, work: lines)
    taken = [line for line in banner(config, rl_data, run) if "takes every" in line]
    assert [line.partition(":")[2][:60] for line in taken] == [
        f" a batch takes every prompt of {tmp_path}/a.jsonl 3.0 times"[:60]
    ]
