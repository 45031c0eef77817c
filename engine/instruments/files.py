"""Files of a run's folder: replaced as a whole, or appended to while the run goes on."""

import json
import os
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path

from isoloss.engine.instruments.console import say
from isoloss.parallel import UserError

MOST_KEPT = 2**30  # bytes that may wait in memory for the disk


def replace_text(path: Path, text: str) -> None:
    """As `replace_bytes`."""
    replace_bytes(path, text.encode(errors="backslashreplace"))  # a name of a file need not be UTF-8


def replace_bytes(path: Path, data: bytes) -> None:
    """At once: whenever the run dies, or the disk refuses, the file holds what it held, or all of `data`."""
    whole = path.with_name(f"{path.name}.new")
    try:
        whole.write_bytes(data)
    except OSError:
        whole.unlink(missing_ok=True)
        raise
    os.replace(whole, path)


class AppendOnlyFile:
    """A file that is made by the first `append`; what it is given is in the file when it returns.

    A disk may be full for a while. What it does not take stays in memory, is told of in one line, and goes into the
    file, in order, with what is appended next.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: FileIO | None = None
        self._kept = bytearray()  # what the file lacks
        self._refused: OSError | None = None

    def append(self, more: bytes = b"") -> None:
        """These bytes, and those that were refused before. Raises UserError where too many wait for the disk."""
        self._kept += more
        before, self._refused = self._refused, self._written()
        if self._refused is None:
            return
        if before is None:
            say(f"isoloss: {self.path} {_why(self._refused)}: kept in memory until it can be", error=True)
        if len(self._kept) > MOST_KEPT:
            raise UserError(
                f"{self.path} {_why(self._refused)}, and more than {MOST_KEPT >> 20} MiB wait for it: make room for "
                "it, or mend the disk"
            )

    def retry(self) -> None:
        """What was refused, if anything."""
        if self._kept:
            self.append()

    def close(self) -> None:
        """Twice does no harm."""
        if self._file is not None and self._file.closed:
            return
        if self._kept and (problem := self._written()):
            say(f"isoloss: {self.path} lacks its last {len(self._kept):,} bytes: it {_why(problem)}", error=True)
        if self._file is not None:
            self._file.close()

    def _written(self) -> OSError | None:
        """What the disk refused, if it did."""
        try:
            if self._file is None:
                self._file = FileIO(self.path, "ab")
            while self._kept:
                del self._kept[: self._file.write(self._kept)]
        except OSError as problem:
            return problem
        return None


class JsonLines(AppendOnlyFile):
    """A JSON object per line, each with the step that it tells of.

    last_step: what an earlier run wrote about later ones is taken out, and a last line that a crash cut short. A whole
        line that is no row, as a loss of power leaves, is taken out too, and the file from there on is kept aside.
    """

    def __init__(self, path: Path, last_step: int):
        super().__init__(path)
        if not path.exists():
            return
        left, damaged, start = list[bytes](), list[int](), 0
        whole = path.read_bytes()
        for row in whole.split(b"\n")[:-1]:
            if (step := _step_of(row)) is None:
                damaged.append(start)
            elif step <= last_step:
                left.append(row)
            start += len(row) + 1
        if damaged:
            aside = _free(path.with_name(f"{path.name}.damaged"))
            aside.write_bytes(whole[damaged[0] :])
            told = f"{path} has {len(damaged)} damaged line(s), which are left out"
            say(f"isoloss: {told}; the file from the first one on is kept as {aside}", error=True)
        replace_bytes(path, b"".join(row + b"\n" for row in left))

    def write(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Raises ValueError for nan and infinities, which JSON does not have. What is neither a number nor a text, such
        as a date of a Parquet file, is told as text."""
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=False, default=str) + "\n" for row in rows]
        self.append("".join(lines).encode(errors="backslashreplace"))


def _step_of(row: bytes) -> int | None:
    """None where it is no row."""
    try:
        step = json.loads(row)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def _free(path: Path) -> Path:
    """`path`, or the first of path-2 and so on that is not there."""
    names = (path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 1000)))
    return next(name for name in names if not name.exists())


def _why(problem: OSError) -> str:
    return f"could not be written ({problem.strerror})"
