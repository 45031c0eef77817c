"""Read JSON Lines and Parquet files one row at a time; every error names the file and the line.

Reading yields unparsed rows with their places, so that a row that cannot be parsed does not end the reading of a file.
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
# Nesting of objects and lists in a row. A constant, so that whether a row is refused does not depend on the depth of
# the call that reads it; far below the depth at which parsing, copying or rendering ends in a RecursionError.
MAX_DEPTH = 100
# Columns of Parquet whose objects have different fields within a file.
NESTED = ("messages", "prompt", "completion", "tools")
# Bytes in memory per byte of a Parquet file, and bytes that any file may have: compression lets a few bytes stand for
# terabytes of the same text. No real file comes near, not even one whose rows all repeat a long system prompt.
MAX_GROWTH, FREE_BYTES = 10_000, 64 << 20
BATCH_ROWS = 64  # rows in memory at a time
MAX_DIGITS = 500  # digits of an integer. A constant, as Python's own limit can be changed in the environment

_REPR = reprlib.Repr()
_REPR.maxlevel = 4
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 200
_REPR.maxlist = _REPR.maxdict = _REPR.maxtuple = 20


@dataclass(frozen=True)
class Row:
    """A row, as its file holds it.

    place: "file:line" (JSON Lines) or "file: row n" (Parquet), counted from 1.
    values: the columns whose value is not null. Parquet gives every row all columns of the file.
    """

    place: str
    values: dict[str, Any]


@dataclass(frozen=True)
class UnreadRow:
    """A row whose place is known, but that is not parsed yet.

    path: the row's file.
    file: index of that file among the files that are read, from 0.
    number: number of the line or row in the file, from 1.
    parse: function of the place that returns the row's values or raises UserError.
    """

    path: str
    file: int
    number: int
    parse: Parse

    @property
    def place(self) -> str:
        return place_of(self.path, self.number)

    def read(self) -> Row:
        """Parse the row. Raises UserError, with the place, if it is no valid row."""
        values = self.parse(self.place)
        return Row(self.place, {name: value for name, value in values.items() if value is not None})


def place_of(path: str, number: int) -> str:
    """Return how messages name a row: "file:line", or "file: row n" for Parquet."""
    return f"{path}: row {number}" if is_parquet(path) else f"{path}:{number}"


def is_parquet(path: str) -> bool:
    return path.lower().endswith(PARQUET)


def check_paths(paths: Sequence[str], key: str) -> None:
    """Raise UserError unless each file exists and is of a kind that `unread_rows` reads. key: such as "data.train"."""
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
    """Return the kinds of files that can be read, for a message."""
    return f"JSON Lines ({', '.join(JSON_LINES)}) or Parquet ({', '.join(PARQUET)})"


def similar_files(path: Path) -> str:
    """Return the hint for a path that does not exist: similar names in the same folder, if there are any."""
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent} either: correct the path"
    names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    if not close:
        return "; correct the path"
    return f"; did you mean {' or '.join(str(path.parent / name) for name in close)}?"


def unread_rows(paths: Sequence[str], key: str) -> Iterator[UnreadRow]:
    """Yield the rows of all files in the order given. Blank lines of JSON Lines are skipped, but counted as lines.

    Raises UserError for a file that is missing, of another kind, or damaged.
    """
    check_paths(paths, key)
    for file, path in enumerate(paths):
        rows = parquet_rows(path, key) if is_parquet(path) else json_rows(path)
        for number, parse in rows:
            yield UnreadRow(path, file, number, parse)


def count_rows(paths: Sequence[str]) -> int:
    """Return the number of rows that `unread_rows` yields for files that can be read."""
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
    """Yield (line number, parse) of every line that is not blank."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, partial(json_values, line)


def json_values(line: bytes, place: str) -> dict[str, Any]:
    """Parse a line of JSON Lines into a row's values. Raises UserError."""
    try:
        text = line.rstrip(b"\r\n").decode("utf-8-sig")  # concatenated files have byte-order marks in their middle
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
    """Parse JSON text. Raises ValueError, with a short reason, if the text is not JSON or holds what no row may hold:

    half of a surrogate pair, which no tokenizer takes; a key twice in an object, as its meaning is unknown; more than
    MAX_DEPTH levels; a number of more than MAX_DIGITS digits.
    """
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
        level = [inner for outer in level for inner in _parts(outer)]
    return any(isinstance(inner, (dict, list)) for inner in level)


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def parquet_rows(path: str, key: str) -> Iterator[tuple[int, Parse]]:
    """Yield (row number, parse) of every row. Raises UserError, with `key`, for a file that is damaged or too large."""
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
    """Convert row `index` of a record batch into plain values. Raises UserError."""
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
    """Return a scalar that Python has no type for, such as a time in nanoseconds, as text; None if Arrow cannot."""
    import pyarrow as pa

    for kind in (pa.string(), pa.int64()):
        try:
            return str(scalar.cast(kind).as_py())
        except (pa.ArrowException, ValueError):
            continue
    return None


def without_nulls(value: Any) -> Any:
    """Remove fields that are null from objects, at every depth."""
    # Arrow gives every object the fields of all objects of its column, and a chat template would write the nulls.
    if isinstance(value, dict):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def shown(value: Any, length: int = 60) -> str:
    """Return a value as an error message shows it: its type and a short representation on one line."""
    text = _REPR.repr(value)
    return f"{type(value).__name__} {text if len(text) <= length else text[:length] + '...'}"


def listed(names: Iterable[str], length: int = 200) -> str:
    """Return names as an error message lists them: on one line of at most about `length` characters."""
    text = " ".join(", ".join(names).split())
    return text if len(text) <= length else text[:length] + "..."


def one_line(error: BaseException, length: int = 200) -> str:
    """Return the type and text of an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:length]
