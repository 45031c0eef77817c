"""Dry runs of many configurations in one process, which they change: python -m support.plans.dry_runs FILE, which
holds rows of JSON."""

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import PIPE
from unittest import mock

import torch

from isoloss.engine.memory.nowhere import Device, Kernels, SimulatedRank
from isoloss.recipes.launch import RECIPES, compose_config
from isoloss.tools.plan import rank
from isoloss.tools.plan.rank import dry_run
from isoloss.tools.plan.report import RankReport
from support.faults.device_faults import FAULTS
from support.runs import warm


@dataclass(frozen=True)
class Row:
    """What a dry run is given, and faults to plant, by their names in `device_faults.FAULTS`. micro_batches: of a step
    on a rank; None: as many as a plan takes, which is twice the pipeline's stages."""

    recipe: str
    overrides: Sequence[str]
    world: int
    rank: int
    device: Device = "meta"
    halves: bool = False
    files: str | None = None
    faults: Sequence[str] = ()
    micro_batches: int | None = None
    kernels: Kernels = "cuda"


def in_a_process(rows: Sequence[Row], file: Path) -> list[RankReport]:
    """What became of every row. Raises RuntimeError where one could not be run."""
    outcomes = outcomes_in_a_process(rows, file)
    if raised := [outcome for outcome in outcomes if isinstance(outcome, str)]:
        raise RuntimeError(raised[0])
    return [outcome for outcome in outcomes if isinstance(outcome, RankReport)]


def outcomes_in_a_process(rows: Sequence[Row], file: Path) -> list[RankReport | str]:
    """What became of every row: a report, or the error that it ended with."""
    file.write_text(json.dumps([asdict(row) for row in rows]))
    command = [sys.executable, "-m", "support.plans.dry_runs", str(file)]
    done = warm.run(command, cwd=Path(__file__).parents[2], check=True, stdout=PIPE, text=True)
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    return [RankReport.loads(line) if line.startswith("{") else json.loads(line) for line in lines]


MARK = "outcome: "  # of the lines that are one: Megatron prints too


def _fewer(count: int) -> contextlib.AbstractContextManager:
    rows = rank.full_rows
    return mock.patch.object(rank, "full_rows", lambda *sizes: rows(*sizes)[: count * sizes[1].dp])


def _outcome(row: Row) -> str:
    config = compose_config(row.recipe, RECIPES[row.recipe].config, row.overrides)[0]
    files = Path(row.files) if row.files else None
    with contextlib.ExitStack() as planted:
        if row.micro_batches is not None:
            planted.enter_context(_fewer(row.micro_batches))
        for fault in row.faults:
            planted.enter_context(FAULTS[fault]())
        try:
            simulated = SimulatedRank(row.rank, row.world, kernels=row.kernels, device=row.device)
            report = dry_run(config, simulated, halves=row.halves, files=files)
        except RuntimeError as error:
            return json.dumps(f"{type(error).__name__}: {error}")
    return report.dumps()


def main() -> None:
    # As with a torch that is built for CUDA, also where it is not.
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    for values in json.loads(Path(sys.argv[1]).read_text()):
        print(MARK + _outcome(Row(**values)), flush=True)


if __name__ == "__main__":
    main()
