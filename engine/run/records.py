"""Read what a run wrote into its output_dir, also while it goes on. Needs no torch."""

import fcntl
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from isoloss.parallel.runtime.errors import UserError

METRICS, EVALUATIONS = "metrics.jsonl", "eval.jsonl"
ROLLOUTS, EVAL_ROLLOUTS = "rollouts.jsonl", "eval_rollouts.jsonl"
CONFIG, PROVENANCE, LOCK = "config.yaml", "run.json", ".lock"


@dataclass(frozen=True)
class RunRecords:
    """The records of a run. Each call reads its file anew. A file that is missing or damaged raises UserError.

    folder: the output_dir of the run.
    """

    folder: Path

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the numbers of each optimizer step."""
        return map(_numbers, read_rows(self.folder / METRICS))

    def evaluations(self) -> Iterator[dict[str, Any]]:
        """Yield the numbers of each evaluation."""
        return map(_numbers, read_rows(self.folder / EVALUATIONS))

    def rollouts(self) -> Iterator[dict[str, Any]]:
        """Yield each completion that was generated for training, kept or dropped."""
        return read_rows(self.folder / ROLLOUTS)

    def eval_rollouts(self) -> Iterator[dict[str, Any]]:
        """Yield each completion of the evaluations."""
        return read_rows(self.folder / EVAL_ROLLOUTS)

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration, group by group."""
        return self._whole(CONFIG, yaml.safe_load)

    def provenance(self) -> dict[str, Any]:
        """Return the versions, the layout, the git revision and the command."""
        return self._whole(PROVENANCE, json.loads)

    def total_steps(self) -> int:
        """Return the number of optimizer steps of the whole run. Raises UserError if no file has it."""
        steps = self.provenance().get("total_steps") or self.config().get("train", {}).get("steps")
        if not steps:
            raise UserError(f"{self.folder / PROVENANCE} has no total_steps: an earlier isoloss wrote it")
        return steps

    def is_running(self) -> bool | None:
        """Return whether a process runs the run now; None on a file system without locks."""
        try:
            with (self.folder / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back at once; a run holds its own to the end
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError:
            return None
        return False

    def last_step_time(self) -> float:
        """Return the time at which the newest row of a step was written, in seconds since the epoch."""
        return (self.folder / METRICS).stat().st_mtime

    def _whole(self, name: str, parse: Any) -> dict[str, Any]:
        path = self.folder / name
        try:
            values = parse(_opened(path).read())
        except (ValueError, yaml.YAMLError) as error:
            raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}; copy the file again") from None
        if not isinstance(values, dict):
            raise UserError(f"{path}: must hold names and values, not {type(values).__name__}; copy the file again")
        return values


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON Lines file. A last line without its newline is still being written, and is left out."""
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            yield _row(path, number, line)


class NewRows:
    """The rows of a JSON Lines file that a run goes on writing, or has not begun yet.

    replaced: whether the last `read` found another file than the one before, as a resumed run writes.
    """

    def __init__(self, path: Path):
        self._path, self._inode = path, 0
        self._bytes = self._lines = 0  # read so far
        self.replaced = False

    def read(self) -> list[dict[str, Any]]:
        """Return the numbers of the rows since the last call, of another file of all of them."""
        try:
            inode = self._path.stat().st_ino
        except FileNotFoundError:
            return []
        self.replaced = self._inode not in (0, inode)
        if self.replaced:
            self._bytes = self._lines = 0
        self._inode = inode
        with _opened(self._path) as file:
            file.seek(self._bytes)
            lines = file.read().split(b"\n")[:-1]
        rows = [_numbers(_row(self._path, self._lines + k, line)) for k, line in enumerate(lines, start=1)]
        self._bytes += sum(len(line) + 1 for line in lines)
        self._lines += len(lines)
        return rows


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: give the output_dir of a run") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line, parse_constant=_refuse)
    except ValueError as error:
        raise UserError(f"{path}:{number}: not JSON ({error}); copy the file again") from None
    if not isinstance(row, dict):
        raise UserError(f"{path}:{number}: not a row, but {type(row).__name__}; copy the file again")
    return row


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a row, with those that JSON does not have and that are texts in the file."""
    return {key: float(value) if value in ("nan", "inf", "-inf") else value for key, value in row.items()}
