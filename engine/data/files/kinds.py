"""Find the kind of a file by its name, and the function that reads it."""

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from isoloss.engine.data.files.arrow_files import arrow_rows, parquet_rows
from isoloss.engine.data.files.csv_files import separated_rows
from isoloss.engine.data.files.json_files import json_lines, json_rows
from isoloss.engine.data.files.opening import COMPRESSED
from isoloss.engine.data.files.values import Parse
from isoloss.parallel.runtime.errors import UserError


@dataclass(frozen=True)
class Kind:
    """A kind of files.

    name: word for messages.
    suffixes: endings of names, before .gz or .zst.
    read: function of a path and a key for messages that yields (number, parse) of each row.
    of_lines: whether `number` is that of the row's line; else it is that of the row.
    in_columns: whether Arrow holds the rows, which gives every object the fields of all objects of its column.
    """

    name: str
    suffixes: tuple[str, ...]
    read: Callable[[str, str], Iterator[tuple[int, Parse]]]
    of_lines: bool = False
    in_columns: bool = False


KINDS = (
    Kind("JSON Lines", (".jsonl", ".json-lines", ".ndjson"), json_lines, of_lines=True),
    Kind("JSON", (".json",), json_rows),
    Kind("Parquet", (".parquet",), parquet_rows, in_columns=True),
    Kind("Arrow", (".arrow", ".feather"), arrow_rows, in_columns=True),
    Kind("CSV", (".csv",), partial(separated_rows, delimiter=",")),
    Kind("TSV", (".tsv",), partial(separated_rows, delimiter="\t")),
)
BY_SUFFIX = {suffix: kind for kind in KINDS for suffix in kind.suffixes}


@lru_cache(maxsize=256)
def kind_of(path: str) -> Kind | None:
    """Return the kind of the file that a path names; None if files of that name are not read."""
    name = Path(path.lower())
    return BY_SUFFIX.get(Path(name.stem).suffix if name.suffix in COMPRESSED else name.suffix)


def place_of(path: str, number: int) -> str:
    """Return how messages name a row: "file:line" for JSON Lines, "file: row n" for other kinds."""
    kind = kind_of(path)
    return f"{path}:{number}" if kind is not None and kind.of_lines else f"{path}: row {number}"


def kinds() -> str:
    """Return the kinds of files that can be read, for a message."""
    *first, last = (f"{kind.name} ({', '.join(kind.suffixes)})" for kind in KINDS)
    return f"{', '.join(first)} or {last}"


def check_paths(paths: Sequence[str], key: str) -> None:
    """Raise UserError unless each file exists and is of a kind that can be read. key: such as "data.train"."""
    if not paths:
        raise UserError(f"{key} is empty: give one or more files: {kinds()}")
    for name in paths:
        path = Path(name)
        if not path.is_file():
            raise UserError(f"{key}: no such file: {name}{similar_files(path)}")
        if kind_of(name) is None:
            raise UserError(f"{key}: {name} is of kind {path.suffix or '(none)'!r}: give {kinds()} files")


def similar_files(path: Path) -> str:
    """Return the hint for a path that does not exist: similar names in the same folder, if there are any."""
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent} either: correct the path"
    names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    if not close:
        return "; correct the path"
    return f"; did you mean {' or '.join(str(path.parent / name) for name in close)}?"
