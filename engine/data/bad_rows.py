"""Bad rows: the first one ends the run, or up to data.max_rejects of a split are left out and noted."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from isoloss.engine.config.schema import DataConfig
from isoloss.engine.data.rows import UnreadRow, place_of
from isoloss.engine.instruments.files import replace_text
from isoloss.parallel.runtime.errors import UserError

NAME = "rejects.jsonl"


@dataclass(frozen=True)
class Reject:
    """A row that was left out.

    file: which of the files of its split, from 0, whatever their names are now.
    number: of its line or row, from 1.
    reason: why, and how to mend it.
    """

    file: int
    number: int
    reason: str

    def place(self, paths: Sequence[str]) -> str:
        return place_of(paths[self.file], self.number)

    def told(self, paths: Sequence[str]) -> str:
        """What is wrong, and where. paths: the files of its split."""
        return f"{self.place(paths)}: {self.reason}"


class Rejects:
    """Collects the bad rows of a split while it is read.

    key: "data.train" or "data.eval". paths: its files. most: data.max_rejects.
    """

    def __init__(self, key: str, paths: Sequence[str], most: int):
        self.key, self.paths, self._most = key, paths, most
        self.rows: list[Reject] = []

    @contextlib.contextmanager
    def instead_of_error(self, row: UnreadRow) -> Iterator[None]:
        """Within it a UserError means that `row` is bad; raises one where there are too many such rows."""
        try:
            yield
        except UserError as error:
            reason = str(error).removeprefix(f"{row.place}: ")
            self.rows.append(Reject(row.file, row.number, reason))
            check(self.key, self.paths, self.rows, self._most)


def check(key: str, paths: Sequence[str], rejects: Sequence[Reject], most: int) -> None:
    """UserError where more rows are bad than may be; of none at all, it is what is wrong with the first."""
    if len(rejects) <= most:
        return
    first = rejects[0].told(paths)
    if most == 0:
        raise UserError(first)
    raise UserError(
        f"{key}: {most + 1} bad rows are more than data.max_rejects={most}, reading stopped there; the first is "
        f"{first}; mend such rows, or raise data.max_rejects"
    )


@dataclass(frozen=True)
class RejectsOfRun:
    """Of each split: its key, its files, the rows of it that were left out."""

    splits: tuple[tuple[str, Sequence[str], Sequence[Reject]], ...]

    @classmethod
    def of(cls, data: DataConfig, train: Sequence[Reject], eval: Sequence[Reject]) -> "RejectsOfRun":
        return cls((("data.train", data.train, train), ("data.eval", data.eval, eval)))

    def told(self, folder: Path) -> list[str]:
        """A line for the user, where there are any."""
        count = sum(len(rejects) for _, _, rejects in self.splits)
        return [f"data: {count:,} bad row{'s' if count > 1 else ''} left out, see {folder / NAME}"] if count else []

    def write(self, folder: Path) -> None:
        """`folder`/rejects.jsonl, a line for each row; no file where there are none."""
        lines = [
            json.dumps({"split": key, "place": reject.place(paths), "reason": reject.reason}, ensure_ascii=False) + "\n"
            for key, paths, rejects in self.splits
            for reject in rejects
        ]
        if lines:
            replace_text(folder / NAME, "".join(lines))
        else:
            (folder / NAME).unlink(missing_ok=True)  # of the run that goes on here
