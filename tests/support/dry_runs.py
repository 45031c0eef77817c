"""Dry runs of many configurations in one process, which they change: python -m support.dry_runs FILE, which holds rows
of JSON."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from isoloss.recipes.launch import compose_config
from isoloss.tools.dryrun.rank import RECIPES, dry_run
from isoloss.tools.dryrun.report import RankReport
from support.device_faults import FAULTS


@dataclass(frozen=True)
class Row:
    """What a dry run is given, and faults to plant, by their names in `device_faults.FAULTS`."""

    recipe: str
    overrides: Sequence[str]
    world: int
    rank: int
    device: str = "meta"
    halves: bool = False
    files: str | None = None
    faults: Sequence[str] = ()


def in_a_process(rows: Sequence[Row], file: Path) -> list[RankReport]:
    """What became of every row. Raises RuntimeError where one could not be run."""
    outcomes = outcomes_in_a_process(rows, file)
    if raised := [outcome for outcome in outcomes if isinstance(outcome, str)]:
        raise RuntimeError(raised[0])
    return [outcome for outcome in outcomes if isinstance(outcome, RankReport)]


def outcomes_in_a_process(rows: Sequence[Row], file: Path) -> list[RankReport | str]:
    """What became of every row: a report, or the error that it ended with."""
    file.write_text(json.dumps([asdict(row) for row in rows]))
    command = [sys.executable, "-m", "support.dry_runs", str(file)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], check=True, stdout=subprocess.PIPE, text=True)
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    return [RankReport.loads(line) if line.startswith("{") else json.loads(line) for line in lines]


MARK = "outcome: "  # of the lines that are one: Megatron prints too


def _outcome(row: Row) -> str:
    config = compose_config(row.recipe, RECIPES[row.recipe], row.overrides)[0]
    files = Path(row.files) if row.files else None
    with contextlib.ExitStack() as planted:
        for fault in row.faults:
            planted.enter_context(FAULTS[fault]())
        try:
            report = dry_run(config, row.rank, row.world, device=row.device, halves=row.halves, files=files)
        except RuntimeError as error:
            return json.dumps(f"{type(error).__name__}: {error}")
    return report.dumps()


def main() -> None:
    for values in json.loads(Path(sys.argv[1]).read_text()):
        print(MARK + _outcome(Row(**values)), flush=True)


if __name__ == "__main__":
    main()
