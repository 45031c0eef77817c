"""Collect bad rows: up to data.max_rejects of a split are left out and recorded, one more ends the run."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data.files.sources import named_files
from isoloss.engine.data.rows import UnreadRow, place_of
from isoloss.engine.instruments.files import replace_text
from isoloss.parallel.runtime.errors import UserError

NAME = "rejects.jsonl"


@dataclass(frozen=True)
class Reject:
    """A row that was left out.

    file: index of the row's file among the files of its split, from 0; files may be renamed between two runs.
    number: number of the line or row in that file, from 1.
    reason: why the row is bad, and how to mend it.
    """

    file: int
    number: int
    reason: str

    def place(self, paths: Sequence[str]) -> str:
        """Return "file:line" or "file: row n". paths: the files of the split."""
        return place_of(paths[self.file], self.number)

    def message(self, paths: Sequence[str]) -> str:
        """Return the place and the reason. paths: the files of the split."""
        return f"{self.place(paths)}: {self.reason}"


class Rejects:
    """Collects the bad rows of a split while its files are read.

    key: "data.train" or "data.eval".
    paths: the files of the split.
    most: data.max_rejects.
    rows: the bad rows so far.
    """

    def __init__(self, key: str, paths: Sequence[str], most: int, rows: Sequence[Reject] = ()):
        self.key, self.paths, self._most = key, paths, most
        self.rows: list[Reject] = [*rows]

    @contextlib.contextmanager
    def instead_of_error(self, row: UnreadRow) -> Iterator[None]:
        """Record a UserError of the block as a bad row. Raises UserError when more than `most` rows are bad."""
        try:
            yield
        except UserError as error:
            reason = str(error).removeprefix(f"{row.place}: ")
            self.rows.append(Reject(row.file, row.number, reason))
            check(self.key, self.paths, self.rows, self._most)


def check(key: str, paths: Sequence[str], rejects: Sequence[Reject], most: int) -> None:
    """Raise UserError if more than `most` rows are bad. With most=0 the error is the first row's own."""
    if len(rejects) <= most:
        return
    first = rejects[0].message(paths)
    if most == 0:
        raise UserError(first)
    raise UserError(
        f"{key}: {most + 1} bad rows are more than data.max_rejects={most}, reading stopped there; the first is "
        f"{first}; mend such rows, or raise data.max_rejects"
    )


@dataclass(frozen=True)
class RejectsOfRun:
    """The bad rows of all splits.

    splits: (key, files, bad rows) of each split.
    """

    splits: tuple[tuple[str, Sequence[str], Sequence[Reject]], ...]

    @classmethod
    def of(cls, data: DataConfig, train: Sequence[Reject], eval: Sequence[Reject]) -> "RejectsOfRun":
        splits = (("data.train", data.paths("train"), train), ("data.eval", data.eval, eval))
        return cls(tuple((key, named_files(names, key), rejects) for key, names, rejects in splits))

    def lines(self, folder: Path) -> list[str]:
        """Return a line for the user if any row was left out, else no line. folder: the run's folder."""
        count = sum(len(rejects) for _, _, rejects in self.splits)
        return [f"data: {count:,} bad row{'s' if count > 1 else ''} left out, see {folder / NAME}"] if count else []

    def write(self, folder: Path) -> None:
        """Write `folder`/rejects.jsonl, a line per bad row. Without bad rows, leave no such file."""
        rows = [
            json.dumps({"split": key, "place": reject.place(paths), "reason": reject.reason}, ensure_ascii=False) + "\n"
            for key, paths, rejects in self.splits
            for reject in rejects
        ]
        if rows:
            replace_text(folder / NAME, "".join(rows))
        else:
            (folder / NAME).unlink(missing_ok=True)  # a resumed run may have written one before its rows were mended
