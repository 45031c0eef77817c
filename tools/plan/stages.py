"""Make dry runs of one rank of every pipeline stage, each in a process of its own."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isoloss.parallel import Layout, UserError
from isoloss.parallel.runtime.console import Progress
from isoloss.tools.plan.report import RankReport

PROCESSES = 2  # number at a time: each takes half a gigabyte


def dry_runs(recipe: str, overrides: Sequence[str], layout: Layout) -> list[RankReport]:
    """Make a dry run of the first rank of every stage; all other ranks of a stage do the same.

    Raises UserError where the configuration, the model and the layout do not fit together.
    """
    ranks = [stage * (layout.world_size // layout.pp) for stage in range(layout.pp)]
    reports = []
    with ThreadPoolExecutor(PROCESSES) as pool, Progress("planning", "pipeline stages", lambda: len(ranks)) as progress:
        for report in pool.map(lambda rank: dry_run(recipe, overrides, layout.world_size, rank), ranks):
            reports.append(report)
            progress.advance()
    return reports


def dry_run(recipe: str, overrides: Sequence[str], world_size: int, rank: int, *options: str) -> RankReport:
    """Make a dry run of one rank. options: further arguments of isoloss.tools.plan.rank. Raises as `dry_runs`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "isoloss.tools.plan.rank", recipe, str(world_size), str(rank), str(file)]
        # GPUs are hidden: the stubs for CUDA have no effect on a machine with a GPU.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, *options, *overrides], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode == 2:
            raise UserError(done.stderr.strip().splitlines()[-1].removeprefix("isoloss: error: "))
        if done.returncode != 0:
            raise RuntimeError(f"the dry run of rank {rank} ended with status {done.returncode}:\n{done.stderr}")
        return RankReport.loads(file.read_text())
