"""Read what a run wrote into its output_dir, also while it goes on. Needs no torch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from isoloss.parallel.runtime.errors import UserError

METRICS, EVALUATIONS = "metrics.jsonl", "eval.jsonl"
ROLLOUTS, EVAL_ROLLOUTS = "rollouts.jsonl", "eval_rollouts.jsonl"
CONFIG, PROVENANCE = "config.yaml", "run.json"


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
            try:
                row = json.loads(line, parse_constant=_refuse)
            except ValueError as error:
                raise UserError(f"{path}:{number}: not JSON ({error}); copy the file again") from None
            if not isinstance(row, dict):
                raise UserError(f"{path}:{number}: not a row, but {type(row).__name__}; copy the file again")
            yield row


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: give the output_dir of a run") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a row, with those that JSON does not have and that are texts in the file."""
    return {key: float(value) if value in ("nan", "inf", "-inf") else value for key, value in row.items()}
