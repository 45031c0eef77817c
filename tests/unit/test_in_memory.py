"""Rows of a program's memory: what a file keeps of them, what is refused, and the samples that they become."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs.runs import TINY

from isoloss.engine import DataConfig, load_dataset, load_rows, load_tokenizer, to_samples
from isoloss.engine.data.in_memory import keep_rows
from isoloss.parallel import UserError

ROWS = [
    {"prompt": "2 + 2 =", "completion": " 4", "level": 1, "tags": ["sum", {"deep": None}]},
    {"prompt": "ä ☃", "completion": " \n", "level": 1e-300, "tags": []},
]


def test_a_file_keeps_rows_as_they_are(tmp_path):
    path = Path(keep_rows(iter(ROWS), "train", tmp_path / "rows"))
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS
    assert load_rows(str(path)) == ROWS and [entry.name for entry in (tmp_path / "rows").iterdir()] == [
        path.parent.name
    ]


def test_the_same_rows_are_kept_once_under_the_name_of_their_split(tmp_path):
    train, other = (keep_rows(rows, "train", tmp_path) for rows in (ROWS, ROWS[:1]))
    assert keep_rows(tuple(ROWS), "train", tmp_path) == train != other
    assert {Path(train).name, Path(keep_rows(ROWS, "eval", tmp_path)).name} == {"train.jsonl", "eval.jsonl"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("file.jsonl", "train is of type str, not rows"),
        ({"text": "one row"}, "train is of type dict, not rows"),
        (3, "train is of type int, not rows"),
        ([{"text": "a"}, "b"], "train[1] is of type str, not a row"),
        ([{"text": "a", 1: 2}], "train[0] has the key 1, which is not text"),
        ([{"text": "a", "score": float("nan")}], "train[0]['score'] is nan"),
        ([{"text": "a", "of": [1, torch.ones(2)]}], "train[0]['of'][1] is a torch.Tensor"),
        ([{"text": "a", "n": np.int64(3)}], "train[0]['n'] is a numpy.int64"),
    ],
)
def test_what_a_file_cannot_keep_is_refused_by_its_place(rows, message, tmp_path):
    with pytest.raises(UserError) as refused:
        keep_rows(rows, "train", tmp_path)
    assert message in str(refused.value) and not [*tmp_path.iterdir()]


def test_rows_within_themselves_are_refused(tmp_path):
    row: dict = {"text": "a"}
    row["self"] = row
    with pytest.raises(UserError, match="is nested more than 100 deep"):
        keep_rows([row], "train", tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"the rows of train could not be written into .*file/rows"):
        keep_rows(ROWS, "train", tmp_path / "file" / "rows")


def test_samples_of_rows_are_those_of_a_data_set(tmp_path):
    rows = [row | {"prompt": f"{n}: {row['prompt']}"} for n, row in enumerate(ROWS * 2)]
    data = DataConfig(train=keep_rows(rows, "train", tmp_path))
    expected = load_dataset(data, "train", str(TINY), vocab_size=2048, cache_dir=tmp_path / "cache")
    found = to_samples(rows, load_tokenizer(str(TINY), 2048))
    assert len(found) == len(expected) == 4
    for index, sample in enumerate(found):
        assert sample.tokens_T.equal(expected[index].tokens_T) and sample.mask_T.equal(expected[index].mask_T)
        assert (sample.id, sample.group) == (f"rows[{index}]", index)


def test_a_row_that_is_no_sample_is_refused_by_its_place():
    with pytest.raises(UserError, match=r"rows\[1\]: unknown kind of row \(keys: question\)"):
        to_samples([ROWS[0], {"question": "?", "text": None}], load_tokenizer(str(TINY), 2048))
