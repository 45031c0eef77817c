"""Dry runs of many configurations in one process: python -m support.dry_runs FILE, which holds rows of JSON.

A row: overrides of the sft recipe, world, rank. Prints a report a line.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from isoloss.engine.config import Config
from isoloss.recipes.launch import compose_config
from isoloss.tools.dryrun.report import RankReport

Row = tuple[Sequence[str], int, int]


def in_a_process(rows: Sequence[Row], file: Path) -> list[RankReport]:
    file.write_text(json.dumps(rows))
    command = [sys.executable, "-m", "support.dry_runs", str(file)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], check=True, stdout=subprocess.PIPE, text=True)
    return [RankReport.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


if __name__ == "__main__":
    from isoloss.tools.dryrun.rank import dry_run  # it changes torch: in this process only

    for overrides, world, rank in json.loads(Path(sys.argv[1]).read_text()):
        print(dry_run(compose_config("sft", Config, overrides)[0], rank, world).dumps(), flush=True)
