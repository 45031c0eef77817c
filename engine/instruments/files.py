"""Write the files of a run's folder: replace one as a whole, or append while the run goes on."""

import json
import os
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path

from isoloss.parallel import UserError
from isoloss.parallel.runtime.console import say

MOST_WAITING = 2**30  # bytes that may wait in memory for the disk


def replace_text(path: Path, text: str) -> None:
    """Replace a file as `replace_bytes` does."""
    replace_bytes(path, text.encode(errors="backslashreplace"))  # names of files in the text need not be UTF-8


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace a file atomically: if the run dies or the disk refuses, its old content stays. Raises OSError."""
    replacement = path.with_name(f"{path.name}.new")
    try:
        replacement.write_bytes(data)
    except OSError:
        replacement.unlink(missing_ok=True)
        raise
    os.replace(replacement, path)


class AppendOnlyFile:
    """A file that the first `append` creates. Bytes are in the file when `append` returns, unless the disk refuses.

    Refused bytes are reported in one line, wait in memory, and are written, in order, before the next ones, as a disk
    may be full for a while.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: FileIO | None = None
        self._waiting = bytearray()
        self._refused: OSError | None = None

    def append(self, more: bytes = b"") -> None:
        """Write bytes, after those that were refused before. Raises UserError if too many wait for the disk."""
        self._waiting += more
        before, self._refused = self._refused, self._flush()
        if self._refused is None:
            return
        if before is None:
            say(f"isoloss: {self.path} {_why(self._refused)}: kept in memory until it can be", error=True)
        if len(self._waiting) > MOST_WAITING:
            raise UserError(
                f"{self.path} {_why(self._refused)}, and more than {MOST_WAITING >> 20} MiB wait for it: make room for "
                "it, or mend the disk"
            )

    def retry(self) -> None:
        """Write what was refused, if anything."""
        if self._waiting:
            self.append()

    def close(self) -> None:
        """Write what is left and close the file. May be called again."""
        if self._file is not None and self._file.closed:
            return
        if self._waiting and (problem := self._flush()):
            say(f"isoloss: {self.path} lacks its last {len(self._waiting):,} bytes: it {_why(problem)}", error=True)
        if self._file is not None:
            self._file.close()

    def _flush(self) -> OSError | None:
        """Write all waiting bytes; return the error of a disk that refuses."""
        try:
            if self._file is None:
                self._file = FileIO(self.path, "ab")
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError as problem:
            return problem
        return None


class JsonLines(AppendOnlyFile):
    """A file with a JSON object per line, each with its "step".

    last_step: step after which this run goes on. Rows of later steps, from an earlier run, are removed.

    An incomplete last line is removed. A complete line that is no row, as after a loss of power, is removed as well,
    and the file from there on is copied to another name.
    """

    def __init__(self, path: Path, last_step: int):
        super().__init__(path)
        if not path.exists():
            return
        rows, damaged, start = list[bytes](), list[int](), 0
        content = path.read_bytes()
        for row in content.split(b"\n")[:-1]:
            if (step := _step_of(row)) is None:
                damaged.append(start)
            elif step <= last_step:
                rows.append(row)
            start += len(row) + 1
        if damaged:
            aside = _free(path.with_name(f"{path.name}.damaged"))
            aside.write_bytes(content[damaged[0] :])
            problem = f"{path} has {len(damaged)} damaged line(s), which are left out"
            say(f"isoloss: {problem}; the file from the first one on is kept as {aside}", error=True)
        replace_bytes(path, b"".join(row + b"\n" for row in rows))

    def write(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Append rows. Values that JSON has no type for, such as a date of a Parquet file, become text.

        Raises ValueError for nan and infinities, and UserError as `append` does.
        """
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=False, default=str) + "\n" for row in rows]
        self.append("".join(lines).encode(errors="backslashreplace"))


def _step_of(row: bytes) -> int | None:
    """Return the step of a row; None if the line is no row."""
    try:
        step = json.loads(row)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def _free(path: Path) -> Path:
    """Return the first of `path`, path-2, path-3 and so on that does not exist."""
    names = (path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 1000)))
    return next(name for name in names if not name.exists())


def _why(problem: OSError) -> str:
    return f"could not be written ({problem.strerror})"
