"""Files of rows: JSON Lines and Parquet, read one row at a time, every mistake told with its file and line."""

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoloss.parallel.errors import UserError

JSON_LINES, PARQUET = (".jsonl", ".json-lines"), (".parquet",)


@dataclass(frozen=True)
class Row:
    """One row as it stands in its file. `place` is "file:line" (JSON Lines) or "file: row n" (Parquet), from 1.

    Keys whose value is null are left out: Parquet gives every row every column of the file.
    """

    place: str
    values: dict[str, Any]


def check_paths(paths: Sequence[str], key: str) -> None:
    """UserError unless each of the files exists and is of a kind that `read_rows` reads. `key`: "data.train" ..."""
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


def read_rows(paths: Sequence[str], key: str) -> Iterator[Row]:
    """Rows of all files in the order given. Blank JSON lines are skipped (but counted as lines)."""
    check_paths(paths, key)
    for name in paths:
        reader = parquet_rows if Path(name).suffix.lower() in PARQUET else json_rows
        for row in reader(name, key):
            yield Row(row.place, {name: value for name, value in row.values.items() if value is not None})


def json_rows(name: str, key: str) -> Iterator[Row]:
    with open(name, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{name}:{number}"
            try:
                values = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(f"{place}: not UTF-8 at byte {error.start} of the line: save it as UTF-8") from None
            except json.JSONDecodeError as error:
                reason = f"{error.msg} at column {error.colno}"
                raise UserError(f"{place}: not JSON ({reason}): write one JSON object on each line") from None
            if not isinstance(values, dict):
                raise UserError(f"{place}: a row must be a JSON object, not {shown(values)}")
            yield Row(place, values)


def parquet_rows(name: str, key: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(name) as file:
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{name}: row {number}", values)
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{key}: {name} cannot be read as Parquet after row {number} ({one_line(error)}): write the file anew"
        ) from None


def shown(value: Any, length: int = 60) -> str:
    """A value as an error message shows it: its type and a short one-line picture."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= length else text[:length] + '...'}"


def one_line(error: BaseException, length: int = 200) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:length]
