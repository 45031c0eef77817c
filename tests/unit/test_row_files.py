"""Kinds of files of rows, folders, globs, saved data sets and names of the hub: the same rows whatever holds them."""

import gzip
import json
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pyarrow as pa
import pytest
from support.runs.foreign_rows import SKY, TALKS, save, write_file
from support.runs.runs import TINY, write_rows

from isoloss.engine.config.data_config import DataConfig, WeightedFile
from isoloss.engine.data import dataset
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.dataset import load_dataset
from isoloss.engine.data.files import json_files, opening, sources
from isoloss.engine.data.files.kinds import KINDS
from isoloss.engine.data.files.sources import files_of
from isoloss.engine.data.rows import count_rows, unread_rows
from isoloss.engine.rl import prompts
from isoloss.engine.rl.prompts import load_prompts
from isoloss.parallel.runtime.errors import UserError

ROWS = [{"prompt": f'One, "{n}"\té,\n]', "completion": f" two [{n}], {{\\", "number": str(n)} for n in range(70)]


def read(*names: str) -> list[dict]:
    return [row.read().values for row in unread_rows(files_of(names, "data.train"), "data.train")]


FILES = ("rows.jsonl", "rows.ndjson", "rows.json", "rows.csv", "rows.tsv", "rows.parquet", "rows.feather", "file.arrow",
         "stream.arrow", "rows.jsonl.gz", "rows.jsonl.zst", "rows.json.gz", "rows.csv.zst", "rows.tsv.gz")  # fmt: skip


def test_every_kind_holds_the_same_rows(tmp_path):
    suffixes = {suffix for kind in KINDS for suffix in kind.suffixes} - {".json-lines"}
    assert suffixes == {"." + name.split(".")[1] for name in FILES}
    fingerprints = set()
    for name in FILES:
        path = write_file(tmp_path, name, ROWS)
        assert read(path) == ROWS, name
        assert count_rows([path]) == len(ROWS)
        data = DataConfig(train=(path,))
        tokens = load_dataset(data, "train", str(TINY), vocab_size=2048, cache_dir=tmp_path / "cache")
        fingerprints.add(tokens.fingerprint)
        place = f"{path}:5" if ".jsonl" in name or ".ndjson" in name else f"{path}: row 5"
        assert tokens[4].id == place and list(tokens.unused) == ["number"]
    assert len(fingerprints) == 1 and len(list((tmp_path / "cache").iterdir())) >= len(FILES) - 4


def test_what_a_file_is_says_its_content(tmp_path):
    """gzip without its ending, JSON Lines under .json, Windows' mark; an ending without compression."""
    lines = Path(write_file(tmp_path, "rows.jsonl", ROWS)).read_bytes()
    for name, raw in (
        ("a.jsonl", gzip.compress(lines)),
        ("b.json", lines),
        ("c.json", b"\xef\xbb\xbf\n " + json.dumps(ROWS).encode()),
        ("d.jsonl.gz", lines),
        ("e.json", gzip.compress(json.dumps(ROWS).encode())),
        ("f.csv", b"\xef\xbb\xbf" + Path(write_file(tmp_path, "rows.csv", ROWS)).read_bytes()),
    ):
        (tmp_path / name).write_bytes(raw)
        assert read(str(tmp_path / name)) == ROWS, name


@pytest.mark.parametrize("chunk", [1, 2, 7, 100])
def test_an_array_that_is_read_in_pieces(chunk, tmp_path, monkeypatch):
    """Wherever a piece ends: in a text, after a backslash, in a character."""
    monkeypatch.setattr(json_files, "CHUNK", chunk)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS[:20], indent=1, ensure_ascii=False))
    assert read(str(path)) == ROWS[:20]


def test_a_bad_row_of_an_array_or_of_csv_ends_nothing_else(tmp_path):
    (tmp_path / "a.json").write_text(
        '[{"text": "one"}, {"text": 1e}, [2], {"text": "a", "text": "b"}, {"text": "five"}]'
    )
    (tmp_path / "b.csv").write_text('text,n\none,1\ntwo\n"three, and\nmore",3\n')
    (tmp_path / "c.csv").write_text("messages\n[{'role': 'user'}]\n\"[]\"\n")
    for name, bad in (
        ("a.json", {2: "not JSON", 3: "must be a JSON object, not list [2]", 4: "the key text stands twice"}),
        ("b.csv", {2: "1 cells for the 2 columns text, n"}),
        ("c.csv", {1: "`messages` is not JSON"}),
    ):
        path, found = str(tmp_path / name), {}
        for row in unread_rows([path], "data.train"):
            try:
                row.read()
            except UserError as error:
                found[row.number] = str(error)
        assert found.keys() == bad.keys()
        for number, said in bad.items():
            assert found[number].startswith(f"{path}: row {number}: ") and said in found[number]


def test_lists_in_cells(tmp_path):
    """pandas and spreadsheets have no lists: the cell is JSON text; other cells stay text, numbers too."""
    rows = [{"messages": json.dumps(SKY), "tools": "", "n": "007", "prompt": "[1]"}]
    assert read(write_file(tmp_path, "rows.csv", rows)) == [{"messages": SKY, "tools": "", "n": "007", "prompt": "[1]"}]


DAMAGED = {
    "rows.json": [
        b'[{"a": 1},]',
        b'["a"]',
        b'[{"a": 1} {"a": 2}]',
        b'[{"a": 1}] x',
        b'[{"a": 1}}]',
        b"[1, 2]",
        b'[{"a"',
    ],
    "rows.jsonl": [b"\x1f\x8bnothing of gzip", b"\x28\xb5\x2f\xfdnothing of zstd"],
    "rows.csv": [b"a,a\n1,2\n", b"a,\n1,2\n", b'a,b\n"1,2\n', b'a,b\n"1"x,2\n', b"a,b\n\xff,2\n"],
    "rows.arrow": [b"", b"ARROW1", b"nothing of Arrow"],
}


def test_damaged_files(tmp_path):
    cases = [(name, raw) for name, raws in DAMAGED.items() for raw in raws]
    for name in ("rows.jsonl.gz", "rows.csv.zst", "file.arrow", "stream.arrow", "rows.json"):
        whole = Path(write_file(tmp_path, name, ROWS)).read_bytes()
        cases += [(name, whole[:length]) for length in (20, len(whole) // 3, len(whole) - 2)]
    for name, raw in cases:
        path = tmp_path / name
        path.write_bytes(raw)
        with pytest.raises(UserError, match=rf"^data.train: .*{name} cannot be read as .* after row \d+ \(.*\): write"):
            for row in unread_rows([str(path)], "data.train"):
                row.read()


@pytest.mark.parametrize("name", ["file.arrow", "stream.arrow"])
def test_arrow_with_wrong_bytes_ends_no_process(name, tmp_path):
    """Arrow trusts the offsets in a file: read without a look at them, these end the process or show other memory."""
    whole, noise, refused = Path(write_file(tmp_path, name, ROWS)).read_bytes(), random.Random(0), 0
    for _ in range(60):
        raw = bytearray(whole)
        for _ in range(4):
            raw[noise.randrange(len(raw))] ^= 0xFF
        (tmp_path / "wrong.arrow").write_bytes(raw)
        try:
            read(str(tmp_path / "wrong.arrow"))
        except UserError:
            refused += 1
    assert refused > 20


def test_files_of_a_few_bytes_that_hold_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "FREE_BYTES", 1 << 16)
    monkeypatch.setattr(opening, "MAX_GROWTH", 100)
    rows = [{"text": "a" * 5000}] * 400
    same = pa.DictionaryArray.from_arrays(pa.array([0] * 400, pa.int32()), pa.array(["a" * 5000]))
    with pa.ipc.new_file(tmp_path / "d.arrow", pa.schema([("text", same.type)])) as writer:
        writer.write_table(pa.table({"text": same}))
    for path in (
        write_file(tmp_path, "a.jsonl.gz", rows),
        write_file(tmp_path, "b.csv.zst", rows),
        str(tmp_path / "d.arrow"),
    ):
        with pytest.raises(UserError, match=r"^data.train: .* hold more than 100 times the bytes of the file"):
            read(path)
    assert read(write_file(tmp_path, "a.jsonl", rows)) == rows


# -------------------------------------------------------------------------------------------------- folders and globs


def test_folders_and_globs_in_sorted_order(tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, rows in (("b.jsonl", ROWS[2:3]), ("a.jsonl", ROWS[:2]), ("c.jsonl", ROWS[3:4])):
        write_rows(folder / name, rows)
    for name in ("README.md", ".gitattributes", "LICENSE"):
        (folder / name).write_text("x")
    assert read(str(folder)) == read(f"{folder}/*.jsonl") == ROWS[:4]
    assert read(f"{tmp_path}/**/[bc].jsonl") == ROWS[2:4]
    write_rows(tmp_path / "[x].jsonl", ROWS[:1])
    assert read(f"{tmp_path}/[x].jsonl") == ROWS[:1]  # a file of that very name


def test_a_folder_has_one_weight(tmp_path):
    """Whatever the number of its files: the mixture draws from what the user names."""
    (tmp_path / "parts").mkdir()
    for name, rows in (("parts/a.jsonl", ROWS[:2]), ("parts/b.jsonl", ROWS[2:5]), ("one.jsonl", ROWS[5:6])):
        write_rows(tmp_path / name, rows)
    named = (WeightedFile(f"{tmp_path}/parts", 3.0), WeightedFile(f"{tmp_path}/one.jsonl", 1.0))
    data = DataConfig(train=named)
    tokens = load_dataset(data, "train", str(TINY), vocab_size=2048, cache_dir=tmp_path / "cache")
    assert tokens.mixture is not None and tokens.mixture.sizes == (5, 1) and len(tokens.paths) == 3
    asked = load_prompts(data, "train", load_tokenizer(str(TINY), 2048), max_prompt_tokens=512)
    assert asked.mixture is not None and asked.mixture.sizes == (5, 1)


@pytest.mark.parametrize(("module", "step"), [(dataset, "cache_key"), (prompts, "check_template_kwargs")])
def test_a_file_that_comes_while_rows_are_read_moves_no_row_to_another_source(module, step, tmp_path, monkeypatch):
    """It stands before the others, and belongs to the next run."""
    (tmp_path / "parts").mkdir()
    for name, rows in (("parts/b.jsonl", ROWS[:2]), ("one.jsonl", ROWS[5:6])):
        write_rows(tmp_path / name, rows)
    data = DataConfig(train=(WeightedFile(f"{tmp_path}/parts/*", 3.0), WeightedFile(f"{tmp_path}/one.jsonl", 1.0)))
    then = getattr(module, step)

    def first_a_file(*args, **options):
        write_rows(tmp_path / "parts" / "a.jsonl", ROWS[2:5])
        return then(*args, **options)

    monkeypatch.setattr(module, step, first_a_file)
    if module is dataset:
        mixture = load_dataset(data, "train", str(TINY), vocab_size=2048, cache_dir=tmp_path / "cache").mixture
    else:
        mixture = load_prompts(data, "train", load_tokenizer(str(TINY), 2048), max_prompt_tokens=512).mixture
    assert mixture is not None and mixture.sizes == (2, 1)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "is a folder without files of rows: give JSON Lines (.jsonl"),
        (("a.jsonl", "b.csv"), "holds files of several kinds (CSV, JSON Lines): name those that you mean, as in '"),
        (("a.jsonl", "b.txt"), "holds b.txt, which cannot be read: name those that you mean, as in '"),
        (("a.jsonl", "sub/b.jsonl"), "holds sub/, which cannot be read"),
        (("train-0.jsonl", "test-0.jsonl"), "holds files of several splits (test, train): name those that you mean"),
        (("validation.jsonl", "train.jsonl"), "holds files of several splits (eval, train)"),
    ],
)
def test_a_folder_of_which_it_is_not_clear_what_is_meant(names, said, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_rows(tmp_path / name, ROWS[:1])
    with pytest.raises(UserError) as error:
        read(str(tmp_path))
    assert f"{tmp_path} {said}" in str(error.value) and "\n" not in str(error.value)


def test_a_glob_or_a_folder_of_nothing(tmp_path):
    with pytest.raises(UserError, match=r"data.train: no file matches .*\*\.jsonl: correct the pattern"):
        read(f"{tmp_path}/*.jsonl")
    with pytest.raises(UserError, match=r"has no dataset_dict.json, so no split 'train'"):
        read(f"{tmp_path}:train")


def test_saved_data_sets(tmp_path):
    save(tmp_path / "one", TALKS)
    save(tmp_path / "two", TALKS, shards=2)
    for split in ("train", "test"):
        save(tmp_path / "dict" / split, TALKS[:3] if split == "test" else TALKS)
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert read(f"{tmp_path}/one") == read(f"{tmp_path}/dict:train") == TALKS
    assert read(f"{tmp_path}/two") == TALKS[0::2] + TALKS[1::2]
    assert read(f"{tmp_path}/dict:test") == TALKS[:3]
    for name, said in (
        ("dict", f"has several splits: give {tmp_path}/dict:train or {tmp_path}/dict:test"),
        ("dict:dev", "has no split 'dev': give"),
        ("one:train", "has no dataset_dict.json, so no split 'train'"),
    ):
        with pytest.raises(UserError) as error:
            read(f"{tmp_path}/{name}")
        assert said in str(error.value)
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert read(f"{tmp_path}/dict") == TALKS  # one split is no question


@pytest.mark.parametrize(
    "state", ["", "[]", "{}", '{"_data_files": 3}', '{"_data_files": ["../../etc/passwd"]}', '{"_data_files": [{}]}']
)
def test_a_saved_data_set_of_a_stranger(state, tmp_path):
    save(tmp_path / "one", TALKS)
    (tmp_path / "one" / "state.json").write_text(state)
    with pytest.raises(UserError, match=r"data.train: .*state.json .*: save the data set anew"):
        read(f"{tmp_path}/one")


# ------------------------------------------------------------------------------------------------------------- the hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Stands in for the `datasets` library: of openai/gsm8k it has `main` with two splits."""
    sources.hub_files.cache_clear()
    asked = []

    def load_dataset(name, configuration, *, split):
        asked.append((name, configuration, split))
        if (name, configuration) != ("openai/gsm8k", "main"):
            raise ConnectionError(f"Couldn't reach '{name}'\non the Hub")
        path = tmp_path / f"gsm8k-{split}.arrow"
        table = pa.Table.from_pylist([{"question": split, "answer": "#### 1"}])
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
        return SimpleNamespace(cache_files=[{"filename": str(path)}])

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "datasets", module)
    yield asked
    sources.hub_files.cache_clear()


def test_names_of_the_hub(hub):
    for name in ("openai/gsm8k:main:test", "hf://openai/gsm8k:main:test", "hf://datasets/openai/gsm8k:main:test"):
        assert read(name) == [{"question": "test", "answer": "#### 1"}]
    assert read("openai/gsm8k:main:train") == [{"question": "train", "answer": "#### 1"}]
    assert hub == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", "main", "train")]  # each once
    for name, said in (
        ("openai/gsm8k", "name the split of openai/gsm8k: openai/gsm8k:SPLIT or openai/gsm8k:CONFIGURATION:SPLIT"),
        ("no/such:train", "the hub does not give no/such (ConnectionError: Couldn't reach 'no/such' on the Hub)"),
    ):
        with pytest.raises(UserError) as error:
            read(name)
        assert said in str(error.value) and "\n" not in str(error.value)
    assert hub[-1] == ("no/such", None, "train")


def test_a_name_of_the_hub_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    sources.hub_files.cache_clear()
    with pytest.raises(UserError) as error:
        read("openai/gsm8k")
    assert str(error.value) == (
        "data.train: openai/gsm8k is no file, and to read it from the Hugging Face hub needs the `datasets` library: "
        "pip install 'datasets>=4'; or hf download openai/gsm8k --repo-type dataset --local-dir gsm8k, then name its "
        "files in data.train"
    )


def test_a_path_with_a_mistake_is_no_name_of_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("data/trian", "data/trian.jsonl", "dta/train.jsonl", "train.jsonl", "/data/train", "a/b/c"):
        with pytest.raises(UserError, match=r"^data.train: no such file: "):
            read(name)
    assert hub == []
