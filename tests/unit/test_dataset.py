"""Data sets: files, cache and order of rows (masks are in test_chat)."""

import contextlib
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.runs.runs import write_rows

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data import dataset, token_cache, token_dataset
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.dataset import load_dataset, step_indices, steps_for_epochs
from isoloss.engine.data.token_dataset import DataStats, TokenDataset, fingerprint
from isoloss.parallel.runtime.errors import UserError

TINY = str(files("isoloss.recipes") / "assets" / "tiny")
ROWS = [
    {"text": "One two three four five six."},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there, you."}]},
    {"prompt": "One, two,", "completion": " three."},
]


@pytest.fixture
def load(tmp_path):
    def load(*paths, tokenizer=TINY, split="train", vocab_size=2048, **options):
        data = DataConfig(**{split: tuple(map(str, paths)), "max_length": 512} | options)
        return load_dataset(data, split, tokenizer, vocab_size=vocab_size, cache_dir=tmp_path / "cache")

    return load


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="train.jsonl"):
        return write_rows(tmp_path / name, rows)

    return write


def never(*_):
    raise AssertionError("tokenized again")


def same(a: TokenDataset, b: TokenDataset) -> bool:
    return a.stats == b.stats and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in token_dataset.ROWS)


# --------------------------------------------------------------------------------------------------------------- files


def test_samples(load, write):
    dataset = load(write(*ROWS))
    tokenizer = load_tokenizer(TINY, 2048)
    assert len(dataset) == 3 and dataset.lengths.dtype == np.int64
    samples = list(dataset)
    assert all(isinstance(s, Sample) and s.tokens_T.dtype == torch.int64 for s in samples)
    assert [len(s) for s in samples] == dataset.lengths.tolist()
    assert tokenizer.decode(samples[2].tokens_T[samples[2].mask_T]) == " three.<|im_end|>"
    assert torch.equal(dataset[-1].tokens_T, samples[2].tokens_T)
    targets = sum(int(s.mask_T.sum()) for s in samples)
    forms = {"text": 1, "messages": 1, "prompt + completion": 1}
    assert dataset.stats == DataStats(3, 0, 0, sum(map(len, samples)), targets, forms)
    samples[0].tokens_T.fill_(0)  # a copy: the cache is not touched
    assert dataset[0].tokens_T.any()


def test_parquet_gives_the_same_tokens(load, write, tmp_path):
    columns = {key: [row.get(key) for row in ROWS] for row in ROWS for key in row}  # with nulls, as Parquet has it
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    assert same(load(tmp_path / "rows.parquet"), load(write(*ROWS)))


def test_several_files_blank_lines_and_null_values(load, write):
    both = load(write("", ROWS[0], "  "), write(ROWS[1] | {"text": None, "id": 4}, name="more.json-lines"))
    assert same(both, load(write(*ROWS[:2], name="one.jsonl")))
    places = [sample.id.rpartition("/")[2] for sample in both]
    assert places == ["train.jsonl:2", "more.json-lines:1"]


def test_overlong(load, write):
    path = write(*ROWS)
    lengths = load(path).lengths
    limit = int(lengths.max()) - 1
    kept = load(path, max_length=limit, overlong="drop")
    assert len(kept) == 2 and kept.stats.dropped == 1 and kept.lengths.max() <= limit
    cut = load(path, max_length=limit, overlong="truncate")
    assert cut.stats.truncated == 1 and cut.stats.rows == 3 and cut.lengths.max() == limit
    with pytest.raises(UserError, match=rf"train.jsonl:2: {limit + 1} tokens.*data.max_length={limit}.*drop.*truncate"):
        load(path, max_length=limit)
    with pytest.raises(UserError, match=r"long_train.jsonl:1: truncated .*data.max_length=2, it has no target left"):
        load(
            write({"prompt": "One two three", "completion": " four"}, name="long_train.jsonl"),
            max_length=2,
            overlong="truncate",
        )
    with pytest.raises(UserError, match=r"all 3 rows .*dropped.*data.max_length=2"):
        load(path, max_length=2, overlong="drop")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "a b"', r"train.jsonl:2: not JSON \(.* column \d+\)"),
        ("[1, 2]", r"train.jsonl:2: a row must be a JSON object, not list \[1, 2\]"),
        ({"words": "x"}, r"train.jsonl:2: unknown kind of row \(keys: words\)"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "train.jsonl:2: no assistant turn"),
        ({"prompt": "x", "completion": ""}, "train.jsonl:2: no token of `completion`"),
    ],
)
def test_bad_lines(load, write, line, said):
    with pytest.raises(UserError, match=said) as error:
        load(write(ROWS[0], line))
    assert "\n" not in str(error.value)


def test_bad_files(load, write, tmp_path):
    path = write(*ROWS)
    bad = {
        tmp_path / "trian.jsonl": r"data.train: no such file: .*trian.jsonl; did you mean .*train.jsonl",
        tmp_path / "no" / "x.jsonl": "data.train: no such file: .*there is no folder",
        write("a b", name="rows.txt"): r"data.train: .*rows.txt is of kind '.txt'.*\.jsonl.*\.parquet",
        write("not parquet", name="rows.parquet"): "data.train: .*rows.parquet cannot be read as Parquet",
        write("", name="empty.jsonl"): "data.train: no rows in .*empty.jsonl",
    }
    for name, said in bad.items():
        with pytest.raises(UserError, match=said) as error:
            load(name)
        assert "\n" not in str(error.value)
    (tmp_path / "latin.jsonl").write_bytes('{"text": "é"}\n'.encode("latin-1"))
    with pytest.raises(UserError, match=r"latin.jsonl:1: not UTF-8"):
        load(tmp_path / "latin.jsonl")
    with pytest.raises(UserError, match=r"data.eval is empty"):
        load(split="eval")
    with pytest.raises(UserError, match=r"data.overlong='cut' is not one of error, drop, truncate"):
        load(path, overlong="cut")
    with pytest.raises(UserError, match="ids up to 2047, but the model's vocab_size is 100"):
        load(path, vocab_size=100)
    pq.write_table(pa.table({"text": ["One two", "three four"], "n": [1, 2]}), tmp_path / "ok.parquet")
    with pytest.raises(UserError, match=r"ok.parquet: row 1: \d+ tokens"):
        load(tmp_path / "ok.parquet", max_length=2)


# --------------------------------------------------------------------------------------------------------------- cache


def test_cache_hit_does_not_tokenize(load, write, monkeypatch, tmp_path):
    path = write(*ROWS)
    first = load(path)
    monkeypatch.setattr(dataset, "load_tokenizer", never)
    moved = tmp_path / "moved.jsonl"
    shutil.copy(path, moved)  # the contents count, not the name
    second = load(moved)
    assert same(first, second) and isinstance(second.tokens, np.memmap)
    for change in ({"max_length": 511}, {"overlong": "drop"}, {"vocab_size": 2049}):
        with pytest.raises(AssertionError, match="tokenized again"):
            load(path, **change)
    with pytest.raises(AssertionError, match="tokenized again"):
        load(write(*ROWS[:2]))


def test_variables_of_the_template(load, write, tmp_path):
    """They reach the tokens, and are a part of the name of the cache and of the fingerprint."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.jsonl"))
    template = folder / "chat_template.jinja"
    template.write_text("{{ greeting | default('') }}" + template.read_text())
    path = write(ROWS[1])
    plain, long = (
        load(path, tokenizer=str(folder), template_kwargs=kwargs) for kwargs in ({}, {"greeting": "Hi, you"})
    )
    tokenizer = load_tokenizer(str(folder), 2048)
    expected = tokenizer.apply_chat_template(ROWS[1]["messages"], greeting="Hi, you")["input_ids"]
    assert long[0].tokens_T.tolist() == expected and long.fingerprint != plain.fingerprint
    assert same(load(path, tokenizer=str(folder)), plain)
    with pytest.raises(UserError, match=r"data.template_kwargs.greetings is not read"):
        load(path, tokenizer=str(folder), template_kwargs={"greetings": "Hi"})


def test_fingerprint(load, write):
    """Of tokens, targets and where sequences end: read back as it was, the same for the same rows of another file."""
    first = load(write(*ROWS)).fingerprint
    assert load(write(*ROWS)).fingerprint == first  # from the cache
    assert load(write("", *ROWS, name="other.jsonl"), max_length=300).fingerprint == first
    asked = {"messages": [*ROWS[1]["messages"], {"role": "user", "content": "So"}]}
    others = (
        ROWS[::-1],
        ROWS[:2],
        [*ROWS, ROWS[0]],
        [ROWS[0], asked, ROWS[2]],
        [ROWS[0], ROWS[1], {"text": "One, two, three."}],
    )
    found = {load(write(*rows, name=f"{n}.jsonl")).fingerprint for n, rows in enumerate(others)}
    assert len(found | {first}) == 6

    def of(tokens, mask, offsets):
        return fingerprint({"tokens": np.array(tokens), "mask": np.array(mask), "offsets": np.array(offsets)})

    assert of([1, 2, 3], [0, 1, 1], [0, 3]) == of([1, 2, 3], [0, 1, 1], [0, 3])
    changed = {
        of([1, 2, 3], [0, 1, 1], [0, 3]),
        of([1, 2, 4], [0, 1, 1], [0, 3]),
        of([1, 2, 3], [0, 0, 1], [0, 3]),
        of([1, 2, 3], [0, 1, 1], [0, 1, 3]),
    }
    assert len(changed) == 4


def test_cache_follows_the_tokenizer_files(load, write, tmp_path):
    folder = tmp_path / "tokenizer"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.jsonl"))
    path = write(*ROWS)
    before = load(path, tokenizer=str(folder))
    template = folder / "chat_template.jinja"
    template.write_text("Talk:\n" + template.read_text())
    after = load(path, tokenizer=str(folder))
    assert after.stats.tokens > before.stats.tokens


def test_cache_follows_the_template_of_rows_with_tools(load, write, tmp_path):
    """transformers takes it from a folder of its own."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.jsonl"))
    tool_use = folder / "additional_chat_templates" / "tool_use.jinja"
    tool_use.parent.mkdir()
    template = (folder / "chat_template.jinja").read_text()
    path = write(ROWS[1] | {"tools": [{"type": "function", "function": {"name": "add"}}]})
    counts = []
    for text in (template, "Tools:\n" + template):
        tool_use.write_text(text)
        counts.append(load(path, tokenizer=str(folder)).stats.tokens)
    assert counts[1] > counts[0]


def test_columns_that_are_not_read_and_what_ends_turns_are_kept(load, write):
    path = write(ROWS[0] | {"id": 1}, ROWS[1] | {"source": "a", "id": 2}, ROWS[2])
    for _ in range(2):  # made, and read from the cache
        found = load(path)
        assert found.unused == ("id", "source") and list(found.turn_ends) == ["<|im_end|>"]


@pytest.mark.parametrize("name", ["tokens.npy", "mask.npy", "offsets.npy", "meta.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_damaged_cache_is_rebuilt(load, write, tmp_path, name, damage):
    path = write(*ROWS)
    load(path)
    (file,) = (tmp_path / "cache").glob(f"*/{name}")
    whole = file.read_bytes()
    if damage == "gone":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(whole[:-9])
    else:
        file.write_bytes(whole[:-9] + bytes(255 - byte for byte in whole[-9:]))
    load(path)
    assert file.read_bytes() == whole


def test_leftovers_of_a_killed_process(load, write, tmp_path, monkeypatch):
    path = write(*ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(token_cache.os, "rename", never)
        with pytest.raises(AssertionError):
            load(path)
    assert len(load(path)) == 3
    assert [p.name for p in (tmp_path / "cache").iterdir() if "partial" in p.name] == []


@pytest.mark.parametrize("file", ["tokens.npy", "meta.json"])
def test_a_cache_that_finds_no_room_is_told_and_leaves_nothing(load, write, tmp_path, monkeypatch, file):
    made = Path.mkdir

    def without_room(folder, *args, **options):
        made(folder, *args, **options)
        if folder.name.endswith(".partial"):
            (folder / file).symlink_to("/dev/full")

    monkeypatch.setattr(Path, "mkdir", without_room)
    with pytest.raises(UserError, match=rf"could not be written into data.cache_dir={tmp_path}/cache .*: make room"):
        load(write(*ROWS))
    assert list((tmp_path / "cache").iterdir()) == []


def test_one_of_many_ranks_tokenizes(load, write, tmp_path, monkeypatch):
    """Ranks are threads here: the lock is one of opened files, whoever opened them."""
    path, log = write(*ROWS), tmp_path / "log"

    def logged(*arguments):
        with open(log, "a") as file:
            file.write("tokenized\n")
        return load_tokenizer(*arguments)

    monkeypatch.setattr(dataset, "load_tokenizer", logged)
    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(load, [path] * 4)
    assert all(same(first, other) for other in others)
    assert log.read_text() == "tokenized\n"


@pytest.mark.parametrize("step", ["tokenize", "_fill"])
def test_another_machine_may_be_faster(load, write, tmp_path, monkeypatch, step):
    """Its lock is in a temporary folder of its own. What it has put there, and reads, stays the very files. It deletes
    the shards of both, before ours are copied or afterwards."""
    module = dataset if step == "tokenize" else token_cache
    path, faster, inodes, alone = write(*ROWS), [], [], getattr(module, step)

    def overtaken(*arguments):
        made = alone(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(module, step, alone)
            patch.setattr(dataset, "exclusively", lambda folder: contextlib.nullcontext())
            patch.setattr(token_cache.platform, "node", lambda: "other")
            faster.append(load(path))
        inodes.append(os.stat(faster[0].tokens.filename).st_ino)
        return made

    monkeypatch.setattr(module, step, overtaken)
    ours = load(path)
    assert same(ours, faster[0])
    (file,) = (tmp_path / "cache").glob("*/tokens.npy")
    assert file.stat().st_ino == inodes[0] and os.path.samefile(file, ours.tokens.filename)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_another_machine_may_mend_a_cache_at_the_same_time(load, write, tmp_path, monkeypatch):
    """Between our look at a damaged folder and our moving it away."""
    path = write(*ROWS)
    load(path)
    (folder,) = (tmp_path / "cache").iterdir()
    whole, kept = folder / "meta.json", (folder / "meta.json").read_bytes()
    whole.write_bytes(b"{")
    rename, inode = os.rename, (folder / "tokens.npy").stat().st_ino

    def mended_meanwhile(source, target):
        if source == folder:
            whole.write_bytes(kept)
        rename(source, target)

    monkeypatch.setattr(token_cache.os, "rename", mended_meanwhile)
    assert len(load(path)) == 3
    assert (folder / "tokens.npy").stat().st_ino == inode and list((tmp_path / "cache").iterdir()) == [folder]


def test_a_cache_that_another_machine_takes_away_is_not_needed(load, write, tmp_path, monkeypatch):
    path = write(*ROWS)
    first = load(path)
    monkeypatch.setattr(dataset, "load_cached", lambda *arguments: None)
    assert same(load(path), first)


# ---------------------------------------------------------------------------------------------------------------- lock


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The system's temporary folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_the_lock_is_in_a_folder_of_its_own_and_goes_away(temporary, tmp_path):
    with token_cache.exclusively(tmp_path / "cache"):
        (own,) = temporary.iterdir()
        assert own.stat().st_mode & 0o777 == 0o700 and len(list(own.iterdir())) == 1
    assert list(own.iterdir()) == []


def test_no_link_is_followed_to_a_lock(temporary, tmp_path):
    """Neither in its folder's place, nor in its own: what a link names keeps its text."""
    own, victim = temporary / f"isoloss-{os.getuid()}", tmp_path / "victim"
    victim.mkdir(mode=0o700)
    own.symlink_to(victim)
    refused = pytest.raises(UserError, match=rf"{own} is not a folder of yours alone: delete it")
    with refused, token_cache.exclusively(tmp_path / "cache"):
        pass
    assert list(victim.iterdir()) == []
    own.unlink()
    with token_cache.exclusively(tmp_path / "cache"):
        (lock,) = own.iterdir()
    (victim / "text").write_text("precious")
    lock.symlink_to(victim / "text")
    with pytest.raises(OSError, match="symbolic links"), token_cache.exclusively(tmp_path / "cache"):
        pass
    assert (victim / "text").read_text() == "precious"


@pytest.mark.parametrize("mode", (0o777, 0o750, 0o701))
def test_a_folder_that_others_may_enter_holds_no_lock(mode, temporary, tmp_path):
    own = temporary / f"isoloss-{os.getuid()}"
    own.mkdir()
    own.chmod(mode)
    with pytest.raises(UserError, match=r"is not a folder of yours alone"), token_cache.exclusively(tmp_path / "cache"):
        pass


def test_a_lock_that_was_deleted_holds_nobody(temporary, tmp_path):
    """Many take turns: nobody comes in by a file that the one before has deleted."""
    inside, most = [], []

    def turn(number):
        with token_cache.exclusively(tmp_path / "cache"):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.001)
            inside.remove(number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(turn, range(60)))
    assert max(most) == 1


# --------------------------------------------------------------------------------------------------------------- order


@given(st.integers(1, 40), st.integers(1, 90), st.integers(0, 2**40), st.integers(1, 4))
def test_every_row_once_an_epoch(num_rows, global_size, seed, epochs):
    steps = steps_for_epochs(num_rows, epochs, global_size)
    assert (steps - 1) * global_size < num_rows * epochs <= steps * global_size
    stream = np.concatenate([step_indices(num_rows, step, global_size, seed) for step in range(steps)])
    assert len(stream) == steps * global_size and stream.dtype == np.int64
    for epoch in range(epochs):
        part = stream[epoch * num_rows : (epoch + 1) * num_rows]
        assert np.array_equal(np.sort(part), np.arange(num_rows))
        assert np.array_equal(part, np.random.default_rng([seed, epoch]).permutation(num_rows))


def test_order_depends_on_nothing_else():
    first = step_indices(1000, 7, 16, 3)
    np.random.seed(0)
    step_indices(1000, 200, 16, 3)
    assert np.array_equal(step_indices(1000, 7, 16, 3), first)
    assert not np.array_equal(step_indices(1000, 7, 16, 4), first)
    assert not np.array_equal(step_indices(1000, 8, 16, 3), first)
    assert not np.array_equal(step_indices(16, 1, 16, 3), step_indices(16, 0, 16, 3))  # the next epoch
    # Two steps of 8 are one of 16: the global size only cuts the stream.
    halves = [step_indices(1000, 14, 8, 3), step_indices(1000, 15, 8, 3)]
    assert np.array_equal(np.concatenate(halves), first)
    with pytest.raises(ValueError, match="rows=0"):
        step_indices(0, 0, 1, 0)
