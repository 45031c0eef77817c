"""Files of rows: JSON Lines and Parquet, read one row at a time, every mistake told with its file and line.

A row that cannot be read must not end the reading of its file: a reader gives every row unread, with its place.
"""

import difflib
import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from isoloss.parallel.runtime.errors import UserError

JSON_LINES, PARQUET = (".jsonl", ".json-lines"), (".parquet",)
Parse = Callable[[str], dict[str, Any]]
# Of objects and lists in a row. Fixed, so that no row is refused for the depth of the call that reads it, and far from
# the depth at which reading, copying or rendering one ends in a RecursionError.
MAX_DEPTH = 100
# Columns of Parquet whose objects differ in their fields, within a file.
NESTED = ("messages", "prompt", "completion", "tools")
# What a Parquet file may hold: a few bytes of it can stand for terabytes of the same text. No real one comes near, also
# where all rows repeat a long system prompt.
MAX_GROWTH, FREE_BYTES = 10_000, 64 << 20
BATCH_ROWS = 64  # that are in memory together
MAX_DIGITS = 500  # of an integer, for the same reason: Python's own limit depends on the environment

_PICTURE = reprlib.Repr()
_PICTURE.maxlevel = 4
_PICTURE.maxstring = _PICTURE.maxother = _PICTURE.maxlong = 200
_PICTURE.maxlist = _PICTURE.maxdict = _PICTURE.maxtuple = 20


@dataclass(frozen=True)
class Row:
    """One row as it stands in its file. `place` is "file:line" (JSON Lines) or "file: row n" (Parquet), from 1.

    Keys whose value is null are left out: Parquet gives every row every column of the file.
    """

    place: str
    values: dict[str, Any]


@dataclass(frozen=True)
class UnreadRow:
    """A row of which the place is known, and not yet whether it is one.

    file: which of the files that are read, from 0.
    number: of the line or the row in it, from 1.
    parse: given the place for its messages, the row's values, or UserError.
    """

    path: str
    file: int
    number: int
    parse: Parse

    @property
    def place(self) -> str:
        return place_of(self.path, self.number)

    def read(self) -> Row:
        """Raises UserError, with the place, where there is no row that can be read."""
        values = self.parse(self.place)
        return Row(self.place, {name: value for name, value in values.items() if value is not None})


def place_of(path: str, number: int) -> str:
    return f"{path}: row {number}" if is_parquet(path) else f"{path}:{number}"


def is_parquet(path: str) -> bool:
    return path.lower().endswith(PARQUET)


def check_paths(paths: Sequence[str], key: str) -> None:
    """UserError unless each of the files exists and is of a kind that `unread_rows` reads. `key`: "data.train" ..."""
    if not paths:
        raise UserError(f"{key} is empty: give one or more {kinds()} files")
    for name in paths:
        path = Path(name)
        if path.is_dir():
            raise UserError(f"{key}: {name} is a folder: give the {kinds()} files in it")
        if not path.is_file():
            raise UserError(f"{key}: no such file: {name}{similar_files(path)}")
        if path.suffix.lower() not in JSON_LINES + PARQUET:
            raise UserError(f"{key}: {name} is of kind {path.suffix or '(none)'!r}: give {kinds()} files")


def kinds() -> str:
    return f"JSON Lines ({', '.join(JSON_LINES)}) or Parquet ({', '.join(PARQUET)})"


def similar_files(path: Path) -> str:
    """The hint for a path that does not exist: names around it that look alike, where there are any."""
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent} either: correct the path"
    names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    if not close:
        return "; correct the path"
    return f"; did you mean {' or '.join(str(path.parent / name) for name in close)}?"


def unread_rows(paths: Sequence[str], key: str) -> Iterator[UnreadRow]:
    """Rows of all files in the order given. Blank JSON lines are skipped (but counted as lines)."""
    check_paths(paths, key)
    for file, path in enumerate(paths):
        rows = parquet_rows(path, key) if is_parquet(path) else json_rows(path)
        for number, parse in rows:
            yield UnreadRow(path, file, number, parse)


def count_rows(paths: Sequence[str]) -> int:
    """How many rows `unread_rows` gives of files that can be read."""
    import pyarrow.parquet as pq

    counts = []
    for path in paths:
        if is_parquet(path):
            counts.append(pq.read_metadata(path).num_rows)
        else:
            with open(path, "rb") as file:
                counts.append(sum(bool(line.strip()) for line in file))
    return sum(counts)


def json_rows(path: str) -> Iterator[tuple[int, Parse]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, partial(json_values, line)


def json_values(line: bytes, place: str) -> dict[str, Any]:
    try:
        text = line.rstrip(b"\r\n").decode("utf-8-sig")  # files that were joined have such a mark amid them
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 at byte {error.start} of the line: save it as UTF-8") from None
    try:
        values = parse_json(text)
    except ValueError as error:
        raise UserError(f"{place}: {error}: write one JSON object on each line, or drop the row") from None
    if not isinstance(values, dict):
        raise UserError(f"{place}: a row must be a JSON object, not {shown(values)}")
    return values


def parse_json(text: str) -> Any:
    """A value from JSON text. Raises ValueError, with a short reason, where it is not JSON, and for what no row may
    hold: half of a character, which no tokenizer takes; a key that stands twice, so that nobody knows which is meant;
    more than MAX_DEPTH levels or MAX_DIGITS digits."""
    too_deep = f"JSON of more than {MAX_DEPTH} levels"
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})") from None
    except RecursionError:
        raise ValueError(too_deep) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth_exceeds(value, MAX_DEPTH):
        raise ValueError(too_deep)
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"JSON with half of a character, \\u{ord(error.object[error.start]):04x}") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"JSON in which the key {listed([max(names, key=names.count)], 40)} stands twice")
    return values


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"JSON with a number of {len(digits)} digits")
    return int(digits)


def _depth_exceeds(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [inner for each in level for inner in _parts(each)]
    return any(isinstance(each, (dict, list)) for each in level)


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def parquet_rows(path: str, key: str) -> Iterator[tuple[int, Parse]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number, left = 0, max(FREE_BYTES, MAX_GROWTH * Path(path).stat().st_size)
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                columns = [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in batch.columns]
                left -= sum(column.nbytes for column in columns)
                if left < 0:
                    raise UserError(
                        f"{key}: {path}: its rows up to {number + batch.num_rows:,} hold more than {MAX_GROWTH:,} "
                        "times the bytes of the file: drop rows that repeat, or give them as JSON Lines"
                    )
                for index in range(batch.num_rows):
                    number += 1
                    yield number, partial(parquet_values, batch, index)
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{key}: {path} cannot be read as Parquet after row {number} ({one_line(error)}): write the file anew"
        ) from None


def parquet_values(batch: Any, index: int, place: str) -> dict[str, Any]:
    values = {}
    for name, column in zip(batch.schema.names, batch.columns):
        try:
            value = column[index].as_py()
        except (ValueError, OverflowError, RecursionError) as error:  # text that is not UTF-8, a date out of range
            value = as_text(column[index])
            if value is None:
                raise UserError(
                    f"{place}: `{name}` cannot be read ({one_line(error)}): write the row anew, or take the column out"
                ) from None
        values[name] = without_nulls(value) if name in NESTED else value
    return values


def as_text(scalar: Any) -> str | None:
    """Of a time that is finer than Python's; None of what Arrow cannot write as text either."""
    import pyarrow as pa

    for kind in (pa.string(), pa.int64()):
        try:
            return str(scalar.cast(kind).as_py())
        except (pa.ArrowException, ValueError):
            continue
    return None


def without_nulls(value: Any) -> Any:
    """Objects without the fields that are null, at every depth: Arrow gives every object the fields of all objects of
    its column, and a chat template would write them."""
    if isinstance(value, dict):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def shown(value: Any, length: int = 60) -> str:
    """A value as an error message shows it: its type and a short one-line picture."""
    text = _PICTURE.repr(value)
    return f"{type(value).__name__} {text if len(text) <= length else text[:length] + '...'}"


def listed(names: Iterable[str], length: int = 200) -> str:
    """Names as an error message lists them, on one line, however long they are."""
    text = " ".join(", ".join(names).split())
    return text if len(text) <= length else text[:length] + "..."


def one_line(error: BaseException, length: int = 200) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:length]
