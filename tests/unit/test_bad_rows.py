"""Bad rows: each is refused with its place and the reason, or left out without a trace (data.max_rejects)."""

import json
import math
from importlib.resources import files

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data import dataset as data_module
from isoloss.engine.data.bad_rows import Reject, RejectsOfRun
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.dataset import load_dataset
from isoloss.engine.data.files.values import MAX_DEPTH
from isoloss.engine.rl.prompts import load_prompts
from isoloss.parallel.runtime.errors import UserError

TINY = str(files("isoloss.recipes") / "assets" / "tiny")
USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}
GOOD = [json.dumps({"messages": [USER, ASSISTANT], "prompt": "Hi"}), json.dumps({"text": "One, two.", "prompt": "One"})]
MEGABYTE = "word " * 200_000
LONG_KEY = "k\n" * 100_000

# Of any file: (name, line, part of the reason). What stands in such a row is never looked at.
UNREADABLE = (
    ("empty list", "[]", "must be a JSON object"),
    ("text", '"text"', "must be a JSON object"),
    ("null", "null", "must be a JSON object"),
    ("number", "17", "must be a JSON object"),
    ("NaN", "NaN", "must be a JSON object"),
    ("a megabyte of text", json.dumps(MEGABYTE), "must be a JSON object"),
    ("a list of lists", "[" * 90 + "]" * 90, "must be a JSON object"),
    ("not JSON", "text: hello", "not JSON (Expecting value at column 1)"),
    ("cut short", '{"text": "One, two', "not JSON (Unterminated string"),
    ("cut short after a key", '{"text":', "not JSON"),
    ("two rows on a line", '{"text": "a b"} {"text": "c d"}', "not JSON (Extra data"),
    ("trailing comma", '{"text": "a b",}', "not JSON"),
    ("single quotes", "{'text': 'a b'}", "not JSON"),
    ("comma separated", "text,label", "not JSON"),
    ("a line break within text", '{"text": "a\tb\x0bc"}', "not JSON (Invalid control character"),
    ("raw NUL", '{"text": "a\0b"}', "not JSON (Invalid control character"),
    ("nothing but NUL", "\0" * 50, "not JSON"),
    ("nothing but a mark of byte order", "\ufeff", "not JSON"),
    ("Latin-1", '{"text": "caf\u00e9"}'.encode("latin-1"), "not UTF-8 at byte 13"),
    ("UTF-16", '{"text": "a b"}'.encode("utf-16")[:20], "not UTF-8 at byte 0"),
    ("binary", bytes(byte for byte in range(256) if byte != 10), "not UTF-8"),
    ("surrogates in UTF-8", b'{"text": "a \xed\xa0\x80 b"}', "not UTF-8"),
    ("half a character", r'{"text": "a \ud83d b"}', r"half of a character, \ud83d"),
    ("half a character in a key", r'{"text": "a b", "\uDE00": 1}', r"half of a character, \ude00"),
    ("half a character deep inside", r'{"text": "a b", "more": [{"x": ["\ud800"]}]}', "half of a character"),
    ("a key twice", '{"text": "a b", "text": "c d"}', "the key text stands twice"),
    ("a key twice, inside", '{"messages": [{"role": "user", "content": "a", "role": "b"}]}', "key role stands twice"),
    ("a long key twice", "{%s: 1, %s: 2}" % ((json.dumps(LONG_KEY),) * 2), "stands twice"),
    ("100,000 lists", "[" * 100_000, f"more than {MAX_DEPTH} levels"),
    ("100,000 lists in a column", '{"text": "a b", "more": ' + "[" * 100_000 + "]" * 100_000 + "}", "levels"),
    ("100,000 objects", '{"a":' * 100_000 + "1" + "}" * 100_000, "levels"),
    ("one level too many", '{"text": "a b", "more": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", "levels"),
    ("10,000 digits", '{"text": "a b", "id": ' + "7" * 10_000 + "}", "a number of 10000 digits"),
)  # fmt: skip

# For supervised fine-tuning.
SFT = (
    ("empty object", {}, "unknown kind of row (keys: none)"),
    ("columns of another kind", {"sum": "a", "total": "b"}, "unknown kind of row (keys: sum, total)"),
    ("null alone", {"text": None}, "unknown kind of row (keys: none)"),
    ("long names of columns", {LONG_KEY: 1}, "unknown kind of row (keys: k k k"),
    ("a prompt without completion", {"prompt": "a"}, "unknown kind of row (keys: prompt)"),
    ("empty messages", {"messages": []}, "`messages` must be a list of {role, content} messages"),
    ("messages are text", {"messages": "hello"}, "not str 'hello'"),
    ("messages are a megabyte of text", {"messages": MEGABYTE}, "not str 'word word"),
    ("messages are an object", {"messages": USER}, "not dict"),
    ("messages are a number", {"messages": 3}, "not int 3"),
    ("messages in a list", {"messages": [[USER, ASSISTANT]]}, "`messages[0]` must be an object"),
    ("a message is text", {"messages": ["Hi", ASSISTANT]}, "`messages[0]` must be an object"),
    ("a message is null", {"messages": [None, ASSISTANT]}, "`messages[0]` must be an object"),
    ("no role", {"messages": [{"content": "Hi"}, ASSISTANT]}, "`messages[0].role` must be text, not NoneType"),
    ("a role is a number", {"messages": [{"role": 3, "content": "a"}, ASSISTANT]}, "`messages[0].role` must be text"),
    ("no content", {"messages": [USER, {"role": "assistant"}]}, "`messages[1].content` must be text, not NoneType"),
    ("null content", {"messages": [USER, ASSISTANT | {"content": None}]}, "`messages[1].content` must be text"),
    ("content is a number", {"messages": [USER, ASSISTANT | {"content": 7}]}, "must be text, not int 7"),
    ("content is NaN", {"messages": [USER, ASSISTANT | {"content": math.nan}]}, "must be text, not float nan"),
    ("content is an object", {"messages": [USER, ASSISTANT | {"content": {"a": 1}}]}, "must be text, not dict"),
    ("content is an empty list", {"messages": [USER, ASSISTANT | {"content": []}]}, "must be text, not list"),
    ("parts are texts", {"messages": [USER, ASSISTANT | {"content": ["a"]}]}, "must be a part of text"),
    ("an image", {"messages": [USER | {"content": [{"type": "image"}]}, ASSISTANT]}, "part of type 'image'"),
    ("a part of a long type", {"messages": [USER | {"content": [{"type": LONG_KEY}]}, ASSISTANT]}, "of type 'k k"),
    ("a part without text", {"messages": [USER | {"content": [{"type": "text"}]}, ASSISTANT]}, "part of type 'text'"),
    ("no assistant", {"messages": [USER]}, "no assistant turn to learn from (roles: user)"),
    ("a role that nobody knows", {"messages": [USER | {"role": "wizard"}, ASSISTANT]}, "messages[0].role` is 'wizard'"),
    ("an unknown role alone", {"messages": [{"role": "wizard", "content": "a"}]}, "(roles: wizard)"),
    ("a role of 200,000 characters", {"messages": [{"role": LONG_KEY, "content": "a"}]}, "(roles: k k k"),
    ("an empty completion", {"prompt": "a", "completion": ""}, "no token of `completion` is a target"),
    ("empty text", {"text": ""}, "no token of `text` is a target"),
    ("text is a number", {"text": 5}, "`text` must be text, not int 5"),
    ("text is a list of tokens", {"text": [1, 2, 99_999_999]}, "`text` must be text, not list"),
    ("a prompt of tokens", {"prompt": [1, 2], "completion": [-1]}, "`prompt[0]` must be an object"),
    ("a completion that is a number", {"prompt": "a", "completion": 1}, "`completion` must be text or a list"),
    ("a completion of another role", {"prompt": [USER], "completion": [USER]}, "no assistant turn"),
    ("too long", {"text": MEGABYTE}, "data.max_length=512"),
    ("tools are a number", {"messages": [USER, ASSISTANT], "tools": 3}, "`tools` must be a list of JSON schemas"),
    ("tools are texts", {"messages": [USER, ASSISTANT], "tools": ["add"]}, "`tools[0]` is not JSON"),
    ("tools are an object", {"messages": [USER, ASSISTANT], "tools": {"a": 1}}, "`tools` must be a list"),
    ("tools are broken JSON", {"messages": [USER, ASSISTANT], "tools": "[{"}, "`tools` is not JSON"),
    ("tools are deep JSON", {"messages": [USER, ASSISTANT], "tools": "[" * 100_000}, "`tools` is JSON of more than"),
    ("tools with half a character", {"messages": [USER, ASSISTANT], "tools": '[{"a": "\\ud800"}]'}, "half of a char"),
    ("tools with a key twice", {"messages": [USER, ASSISTANT], "tools": '[{"a": 1, "a": 2}]'}, "stands twice"),
    ("tools beside text", {"text": "a b", "tools": [{}]}, "`text` is plain text"),
)  # fmt: skip

# For reinforcement learning.
PROMPTS = (
    ("empty object", {}, "no prompt (keys: none)"),
    ("long names of columns", {LONG_KEY: 1}, "no prompt (keys: k k k"),
    ("an empty prompt", {"prompt": ""}, "`prompt` is empty"),
    ("a blank prompt", {"prompt": " \n\t"}, "`prompt` is empty"),
    ("no messages", {"prompt": []}, "must be text or a list"),
    ("a number", {"prompt": 3}, "must be text or a list"),
    ("tokens", {"prompt": [1, 2, 3]}, "`prompt[0]` must be an object"),
    ("messages without content", {"messages": [{"role": "user", "content": " "}]}, "`messages` has no content"),
    ("the answer is in it", {"messages": [USER, ASSISTANT]}, "ends with the assistant's turn"),
    ("no role", {"prompt": [{"content": "a"}]}, "`prompt[0].role` must be text"),
    ("null content", {"prompt": [{"role": "user", "content": None}]}, "`prompt[0].content` must be text"),
    ("source is a number", {"prompt": "a", "data_source": 3}, "`data_source` must be text"),
    ("too long", {"prompt": MEGABYTE}, "data.max_length=256"),
    ("tools are texts", {"prompt": [USER], "tools": ["add"]}, "`tools[0]` is not JSON"),
    ("tools are deep JSON", {"prompt": [USER], "tools": "[" * 100_000}, "`tools` is JSON of more than"),
)  # fmt: skip

# What looks bad and is not, and why.
ACCEPTED = (
    ("an escaped NUL is a character like others", '{"text": "a \\u0000 b", "prompt": "a \\u0000 b"}'),
    ("the mark of byte order of a file that was joined", '\ufeff{"text": "One two", "prompt": "One two"}'),
    ("a line that ends as on Windows", '{"text": "One two", "prompt": "One two"}\r'),
    ("a pair of halves is a character", '{"text": "a \\ud83d\\ude00 b", "prompt": "a \\ud83d\\ude00 b"}'),
    ("NaN in a column that nobody reads", '{"text": "a b", "prompt": "a b", "score": NaN, "best": -Infinity}'),
    ("a large number there", '{"text": "a b", "prompt": "a b", "id": ' + "7" * 400 + ', "x": 1e999}'),
    ("levels up to the limit", '{"text": "a b", "prompt": "a b", "x": ' + "[" * 99 + "]" * 99 + "}"),
    ("many brackets side by side", '{"text": "a b", "prompt": "a b", "x": [' + "[]," * 500 + "[{}]]}"),
    ("brackets in text", json.dumps({"text": "a b", "prompt": "a b", "x": "[{" * 5000})),
    ("a column of another type", '{"text": "a b", "prompt": "a b", "id": [1], "answer": {"a": [null]}}'),
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY, 2048)


@pytest.fixture
def load(tmp_path, tokenizer, monkeypatch):
    """load("sft" or "rl", *paths, options of DataConfig) -> a data set or prompts. The tokenizer is loaded once."""
    monkeypatch.setattr(data_module, "load_tokenizer", lambda *_: tokenizer)

    def load(kind, *paths, split="train", tokenizer=tokenizer, **options):
        config = DataConfig(**{split: tuple(map(str, paths)), "max_length": 512} | options)
        if kind == "sft":
            return load_dataset(config, split, TINY, vocab_size=2048, cache_dir=tmp_path / "cache")
        return load_prompts(config, split, tokenizer, max_prompt_tokens=256)

    return load


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="rows.jsonl"):
        lines = [row if isinstance(row, (bytes, str)) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_bytes(
            b"".join(line if isinstance(line, bytes) else line.encode() for each in lines for line in (each, b"\n"))
        )
        return path

    return write


def tokens(found) -> list[list[int]]:
    """Of every row that is left."""
    if hasattr(found, "prompts"):
        return [list(prompt.tokens) for prompt in found.prompts]
    return [sample.tokens_T.tolist() for sample in found]


CASES = [
    pytest.param(kind, row, said, id=f"{kind}-{name}")
    for kind, own in (("sft", SFT), ("rl", PROMPTS))
    for name, row, said in (*UNREADABLE, *own)
]


@pytest.mark.parametrize(("kind", "row", "said"), CASES)
def test_a_bad_row_is_named_and_changes_nothing_for_the_others(kind, row, said, load, write):
    path = write(GOOD[0], row, GOOD[1])
    with pytest.raises(UserError) as error:
        load(kind, path)
    line = str(error.value)
    assert line.startswith(f"{path}:2: ") and said in line
    assert len(line.splitlines()) == 1 and line.isprintable() and len(line) < 500
    found = load(kind, path, max_rejects=1)
    assert found.rejects == (Reject(0, 2, line.removeprefix(f"{path}:2: ")),)
    clean = load(kind, write(GOOD[0], "", GOOD[1]))  # an empty line: prompts are called by their line
    assert found.fingerprint == clean.fingerprint and tokens(found) == tokens(clean) and len(tokens(clean)) == 2


@pytest.mark.parametrize("kind", ("sft", "rl"))
@pytest.mark.parametrize("row", [row for _, row in ACCEPTED], ids=[name for name, _ in ACCEPTED])
def test_what_is_accepted_for_a_reason(kind, row, load, write):
    found = load(kind, write(GOOD[0], row))
    assert found.rejects == () and len(tokens(found)) == 2


def test_a_megabyte_is_a_row_like_others(load, write):
    found = load("sft", write({"text": MEGABYTE}), max_length=10_000_000)
    assert found.rejects == () and found.lengths[0] > 200_000


TEMPLATES = {
    "it refuses": "{{ raise_exception('roles must\nalternate') }}",
    "an error of arithmetic": "{{ 1 // (messages | length - 3) }}{{ messages[2].content }}{{ 1 / 0 }}",
    "a loop without end": "{% for i in range(10 ** 12) %}{% endfor %}",
    "text as a number": "{{ messages[0].content | round }}",
    "a recursion without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "what it may not reach": "{{ messages.append(1) }}",
    "no such method": "{{ messages[0].content.render() }}",
    "a syntax error": "{% if %}",
}


@pytest.mark.parametrize("kind", ("sft", "rl"))
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_a_template_that_fails_is_a_reason_of_the_row(kind, template, load, write, monkeypatch):
    tokenizer = load_tokenizer(TINY, 2048)
    tokenizer.chat_template = template
    monkeypatch.setattr(data_module, "load_tokenizer", lambda *_: tokenizer)
    row = {"messages": [USER, ASSISTANT]} if kind == "sft" else {"prompt": [USER]}
    path = write('{"text": "One two", "prompt": "One two"}', row)
    with pytest.raises(
        UserError, match=r"rows.jsonl:2: the chat template (refuses these messages|of .* is not one)"
    ) as error:
        load(kind, path, tokenizer=tokenizer)
    assert len(str(error.value).splitlines()) == 1
    found = load(kind, path, tokenizer=tokenizer, max_rejects=1)
    assert [(reject.number, len(tokens(found))) for reject in found.rejects] == [(2, 1)]


@pytest.mark.parametrize("kind", ("sft", "rl"))
def test_the_limit(kind, load, write):
    """Of a split, over its files; one more than it allows ends the run, with count, first place and the mend."""
    one, other = write("[1]", GOOD[0], "[2]"), write(GOOD[1], '{"text": 5}', name="more.jsonl")
    found = load(kind, one, other, max_rejects=3)
    assert [(each.file, each.number) for each in found.rejects] == [(0, 1), (0, 3), (1, 2)] and len(tokens(found)) == 2
    assert [each.place((str(one), str(other))) for each in found.rejects] == [f"{one}:1", f"{one}:3", f"{other}:2"]
    for most in (1, 2):  # of SFT there are cached rows by now
        with pytest.raises(UserError) as error:
            load(kind, one, other, max_rejects=most)
        line = str(error.value)
        assert line.startswith(f"data.train: {most + 1} bad rows are more than data.max_rejects={most}")
        assert f"the first is {one}:1: a row must be a JSON object" in line and "raise data.max_rejects" in line
        assert len(line.splitlines()) == 1
    with pytest.raises(UserError, match=f"^{one}:1: a row must be a JSON object"):
        load(kind, one, other)
    with pytest.raises(UserError, match=r"^data.eval: 2 bad rows are more than data.max_rejects=1"):
        load(kind, one, split="eval", max_rejects=1)
    with pytest.raises(UserError, match=r"data.max_rejects=-1 must not be negative"):
        load(kind, one, max_rejects=-1)


def test_the_limit_is_told_alike_without_a_cache(load, write):
    path = write("[1]", GOOD[0], "[2]", "[3]")
    with pytest.raises(UserError) as fresh:
        load("sft", path, max_rejects=1)
    load("sft", path, max_rejects=3)
    with pytest.raises(UserError) as cached:
        load("sft", path, max_rejects=1)
    assert str(fresh.value) == str(cached.value)


@pytest.mark.parametrize("kind", ("sft", "rl"))
def test_nothing_but_bad_rows(kind, load, write):
    with pytest.raises(
        UserError, match=r"data.train: none of the .* is left: 2 are bad, the first is .*rows.jsonl:1: a row"
    ):
        load(kind, write("[1]", "[2]"), max_rejects=5)


def test_cached_rows_keep_their_rejects_wherever_the_file_lies(load, write, monkeypatch):
    first = load("sft", write("[1]", GOOD[0], GOOD[1]), max_rejects=1)
    moved = write("[1]", GOOD[0], GOOD[1], name="moved.jsonl")

    def never(*_):
        raise AssertionError("tokenized again")

    monkeypatch.setattr(data_module, "tokenize", never)
    again = load("sft", moved, max_rejects=9)
    assert again.rejects == first.rejects and again.fingerprint == first.fingerprint
    assert again.rejects[0].place([str(moved)]) == f"{moved}:1"
    assert np.array_equal(again.tokens, first.tokens)


def test_a_bad_row_is_not_the_one_of_its_kind_to_keep(write, tokenizer):
    """data.duplicates=drop: the first row of a question stays, if it is one."""
    path = write({"prompt": "One", "data_source": 3}, {"prompt": "One"}, {"prompt": "One"})
    config = DataConfig(train=(str(path),), max_rejects=1)
    found = load_prompts(config, "train", tokenizer, max_prompt_tokens=256, duplicates="drop")
    assert [prompt.id for prompt in found.prompts] == ["rows.jsonl:2"]
    assert (len(found.rejects), found.repeated) == (1, 1)


def test_rows_over_the_limit(load, write):
    """A row that loses all its targets where it is cut is bad, and not counted as cut; a dropped one is not bad."""
    long = {"prompt": "One two three four", "completion": " five"}
    path = write({"text": "One two three four five six seven"}, long)
    found = load("sft", path, max_length=4, overlong="truncate", max_rejects=1)
    assert [each.number for each in found.rejects] == [2] and "no target left" in found.rejects[0].reason
    assert (found.stats.rows, found.stats.truncated, found.stats.dropped) == (1, 1, 0)
    dropped = load("sft", write(GOOD[1], {"text": MEGABYTE}), overlong="drop", max_rejects=1)
    assert dropped.rejects == () and dropped.stats.dropped == 1


@pytest.mark.parametrize("kind", ("sft", "rl"))
def test_parquet(kind, load, tmp_path):
    """Text that is not UTF-8 and a date that Python has not: the others of the batch are read all the same."""
    texts = pa.array([b"One two", b"caf\xe9 x", b"three four"], pa.binary()).view(pa.string())
    days = pa.array([0, 0, None], pa.date64())
    table = pa.table({"text": texts, "prompt": texts, "day": days})
    path = tmp_path / "rows.parquet"
    pq.write_table(table, path)
    with pytest.raises(UserError, match=rf"^{path}: row 2: `text` cannot be read \(UnicodeDecodeError"):
        load(kind, path)
    found = load(kind, path, max_rejects=1)
    assert [each.place([str(path)]) for each in found.rejects] == [f"{path}: row 2"] and len(tokens(found)) == 2


@pytest.mark.parametrize("kind", ("sft", "rl"))
def test_times_that_python_has_not_are_text_in_columns_that_nobody_asked_for(kind, load, tmp_path):
    """Nanoseconds, of a moment and of a duration."""
    columns = {"text": ["One two"], "prompt": ["One two"], "made": pa.array([1], pa.timestamp("ns")),
               "took": pa.array([5], pa.duration("ns"))}  # fmt: skip
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(columns), path)
    found = load(kind, path)
    assert len(tokens(found)) == 1 and found.rejects == ()
    if kind == "rl":
        assert found.prompts[0].extra["made"].endswith("00:00:00.000000001") and found.prompts[0].extra["took"] == "5"


def test_what_a_run_writes(load, write, tmp_path):
    train, eval = (
        load("sft", write("[1]", GOOD[0]), max_rejects=1),
        load("sft", write("{", GOOD[0], name="e.jsonl"), max_rejects=1),
    )
    config = DataConfig(train=("train.jsonl",), eval=("\udce9val.jsonl",))
    out = tmp_path / "out"
    out.mkdir()
    found = RejectsOfRun.of(config, train.rejects, eval.rejects)
    found.write(out)
    first, second = map(json.loads, (out / "rejects.jsonl").read_text().splitlines())
    assert first == {"split": "data.train", "place": "train.jsonl:1", "reason": train.rejects[0].reason}
    assert second["split"] == "data.eval" and second["place"] == "\udce9val.jsonl:1"  # a name that is not UTF-8
    assert found.lines(out) == [f"data: 2 bad rows left out, see {out}/rejects.jsonl"]
    clean = RejectsOfRun.of(config, (), ())
    clean.write(out)
    assert clean.lines(out) == [] and not (out / "rejects.jsonl").exists()
