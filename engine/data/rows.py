"""Read the rows of files one at a time; every error names the file and the row.

Reading yields unparsed rows with their places, so that a row that cannot be parsed does not end the reading of a file.
`files` has a reader for each kind of files.
"""

import csv
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from isoloss.engine.data.files.arrow_files import count_parquet
from isoloss.engine.data.files.kinds import check_paths, kind_of, place_of
from isoloss.engine.data.files.values import Parse, listed, one_line, parse_json, shown
from isoloss.parallel.runtime.errors import UserError

__all__ = ["Parse", "Row", "UnreadRow", "check_paths", "count_rows", "listed", "one_line", "parse_json", "place_of",
           "shown", "unread_rows"]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A row, as its file holds it or, of `columns.recognised`, as it is trained on.

    place: "file:line" (JSON Lines) or "file: row n" (other kinds), counted from 1.
    values: the columns whose value is not null. Parquet gives every row all columns of the file.
    form: name of the form that the row had in its file; "" for one that `columns.recognised` did not make.
    took: columns of the file that were made into messages.
    aside: columns that data.columns sets aside, by not naming them.
    keeps_system: whether data.system was not given to it, as it has a system message.
    """

    place: str
    values: dict[str, Any]
    form: str = ""
    took: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()
    keeps_system: bool = False


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


def unread_rows(paths: Sequence[str], key: str) -> Iterator[UnreadRow]:
    """Yield the rows of all files in the order given. Blank lines of JSON Lines are skipped, but counted as lines.

    Raises UserError for a file that is missing, of another kind, or damaged.
    """
    check_paths(paths, key)
    for file, path in enumerate(paths):
        kind, number = kind_of(path), 0
        assert kind is not None  # check_paths
        try:
            for number, parse in kind.read(path, key):
                yield UnreadRow(path, file, number, parse)
        except UserError:
            raise
        except (ValueError, OSError, EOFError, zlib.error, csv.Error) as error:
            reason = str(error) if type(error) is ValueError else one_line(error)
            raise UserError(
                f"{key}: {path} cannot be read as {kind.name} after row {number} ({reason}): write the file anew"
            ) from None


def count_rows(paths: Sequence[str]) -> int:
    """Return the number of rows that `unread_rows` yields for files that can be read."""
    counts = []
    for path in paths:
        kind = kind_of(path)
        assert kind is not None
        counts.append(count_parquet(path) if kind.name == "Parquet" else sum(1 for _ in kind.read(path, "")))
    return sum(counts)
