"""Tokenizing by shards: in several processes as in one, after a kill as without, in bounded memory."""

import os
import signal
import tracemalloc
from importlib.resources import files

import numpy as np
import pytest
from support.runs.runs import write_rows

from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data import dataset, token_shards, tokenizing
from isoloss.engine.data.chat import load_tokenizer, tokenize_row
from isoloss.engine.data.dataset import load_dataset
from isoloss.engine.data.rows import unread_rows
from isoloss.engine.data.token_dataset import ARRAYS, fingerprint
from isoloss.engine.data.token_processes import LostProcessError
from isoloss.engine.data.token_shards import finished_shards, read_shard
from isoloss.engine.rl.config import RLDataConfig
from isoloss.parallel.runtime.errors import UserError

TINY = str(files("isoloss.recipes") / "assets" / "tiny")
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def row(number: int) -> dict:
    text = " ".join(WORDS[(number * k) % 10] for k in range(1, 4 + number % 7))
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": f"{text} {number}"}]
    forms = {"text": text, "id": number}, {"messages": turns}, {"prompt": text, "completion": str(number), "by": "me"}
    return forms[number % 3]


@pytest.fixture
def small(monkeypatch):
    """Shards of 8 rows."""
    monkeypatch.setattr(dataset, "SHARD_ROWS", 8)


@pytest.fixture
def several(small, monkeypatch):
    """Two processes from the first row on."""
    monkeypatch.setattr(tokenizing, "cores", lambda: 2)
    monkeypatch.setattr(tokenizing, "ALONE_SECONDS", -1.0)


def load(tmp_path, *paths, cache="cache", kind=DataConfig, **options):
    data = kind(**{"train": tuple(map(str, paths)), "max_length": 512} | options)
    return load_dataset(data, "train", TINY, vocab_size=2048, cache_dir=tmp_path / cache)


def by_hand(paths):
    """Arrays of all good rows, of one list, as no product code makes them."""
    tokenizer = load_tokenizer(TINY, 2048)
    tokens, mask, ends, origins = [], [], [0], []
    for unread in unread_rows([str(path) for path in paths], "data.train"):
        try:
            tokens_T, mask_T = tokenize_row(unread.read(), tokenizer)
        except UserError:
            continue
        tokens += tokens_T
        mask += mask_T
        ends.append(len(tokens))
        origins.append((unread.file, unread.number))
    return {"tokens": tokens, "mask": mask, "offsets": ends, "origins": origins}


def same_as_by_hand(found, paths):
    expected = by_hand(paths)
    for name, dtype in ARRAYS.items():
        assert np.array_equal(getattr(found, name), expected[name]) and getattr(found, name).dtype == dtype, name
    assert found.fingerprint == fingerprint({name: np.array(value) for name, value in expected.items()})


def test_processes_give_what_one_gives(tmp_path, several, monkeypatch):
    """Two files with bad and blank lines, the number of rows no multiple of a shard's. The processes take the keys of a
    recipe of reinforcement learning, which has more: `isoloss-prove` tokenizes rows with them."""
    lines: list = [row(number) for number in range(61)]
    lines[3], lines[40], lines[50] = {"words": 1}, "{", {"prompt": "a", "completion": ""}
    paths = write_rows(tmp_path / "a.jsonl", [*lines[:29], ""]), write_rows(tmp_path / "b.jsonl", lines[29:])
    found = load(tmp_path, *paths, kind=RLDataConfig, duplicates="drop", max_rejects=3)
    same_as_by_hand(found, paths)
    assert [(each.file, each.number) for each in found.rejects] == [(0, 4), (1, 12), (1, 22)]
    with monkeypatch.context() as patch:
        patch.setattr(tokenizing, "cores", lambda: 1)
        alone = load(tmp_path, *paths, cache="alone", max_rejects=3)
    for name in ("stats", "rejects", "unused", "turn_ends", "fingerprint"):
        assert getattr(found, name) == getattr(alone, name)
    assert list(found.stats.forms) == list(alone.stats.forms) and found.unused == ("id", "by")
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_the_first_bad_row_is_named_whichever_process_finds_one(tmp_path, several, monkeypatch):
    """The last shard is finished first."""

    def backwards(job, folder, done, processes):
        tokenizer = load_tokenizer(TINY, 2048)
        for index, rows in reversed([(index, list(rows)) for index, rows in token_shards.rows_by_shard(job)]):
            token_shards.tokenize_shard(rows, job, tokenizer, token_shards.shard_path(folder, index))
            yield index

    monkeypatch.setattr(tokenizing, "shards_of_processes", backwards)
    lines = [row(number) for number in range(64)]
    lines[7] = lines[8] = lines[9] = lines[63] = {"words": 1}
    path = write_rows(tmp_path / "a.jsonl", lines)
    with pytest.raises(UserError, match=r"a.jsonl:8: unknown kind of row"):
        load(tmp_path, path)
    assert not (tmp_path / "cache").exists()


def test_a_killed_tokenization_goes_on(tmp_path, small, monkeypatch):
    """From its finished shards, but a damaged one; what is unfinished is no shard."""
    path = write_rows(tmp_path / "a.jsonl", [row(number) for number in range(60)])
    tokenize, calls = tokenizing.tokenize_shard, []

    def until_killed(rows, job, tokenizer, file):
        calls.append(file.name)
        if len(calls) == 5:
            file.with_suffix(".me-1.partial").write_text("half")
            raise KeyboardInterrupt
        return tokenize(rows, job, tokenizer, file)

    monkeypatch.setattr(tokenizing, "tokenize_shard", until_killed)
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, path)
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.name.endswith(".shards") and len(finished_shards(folder)) == 4
    damaged = folder / "00000002.shard"
    data = damaged.read_bytes()
    damaged.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert read_shard(damaged) is None
    found = load(tmp_path, path)
    assert calls[5:] == [f"{index:08}.shard" for index in (2, 4, 5, 6, 7)]
    same_as_by_hand(found, [path])
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_process_that_is_killed_is_told_in_a_line_and_its_shards_stay(tmp_path, several, monkeypatch):
    path = write_rows(tmp_path / "a.jsonl", [row(number) for number in range(800)])
    read, killed = tokenizing.read_shard, []

    def killing(file):
        if not killed:  # the newest is a process that tokenizes, the oldest the helper
            killed.append(max(workers_of(str(file.parent))))
            os.kill(killed[0], signal.SIGKILL)
        return read(file)

    monkeypatch.setattr(tokenizing, "read_shard", killing)
    with pytest.raises(LostProcessError, match=r"data.train: a process that tokenized .* by signal 9") as error:
        load(tmp_path, path)
    assert "\n" not in str(error.value)
    (folder,) = (tmp_path / "cache").iterdir()
    kept = finished_shards(folder)
    assert kept and workers_of(str(folder)) == []
    monkeypatch.setattr(tokenizing, "cores", lambda: 1)
    same_as_by_hand(load(tmp_path, path), [path])


def workers_of(folder: str) -> list[int]:
    pids = []
    for process in (name for name in os.listdir("/proc") if name.isdigit()):
        try:
            with open(f"/proc/{process}/cmdline") as file:
                line = file.read()
        except OSError:
            continue
        pids += [int(process)] if "token_worker" in line and folder in line else []
    return pids


def test_memory_does_not_grow_with_the_rows(tmp_path, small, monkeypatch):
    """Tokens and masks of ten times the rows. The tokenizer, which is larger than these, is loaded before."""
    tokenizer, peaks = load_tokenizer(TINY, 2048), []
    monkeypatch.setattr(dataset, "load_tokenizer", lambda *_: tokenizer)
    for rows in (64, 640):
        path = write_rows(tmp_path / f"{rows}.jsonl", [{"text": "one two three " * 60}] * rows)
        load(tmp_path, path)
        tracemalloc.start()
        found = load(tmp_path, path, cache="again")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    grown, held = peaks[1] - peaks[0], 5 * found.stats.tokens
    assert held > 400_000 and grown < held / 8, (peaks, held)
