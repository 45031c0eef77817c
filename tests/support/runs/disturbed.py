"""A recipe that somebody disturbs:

torchrun ... -m support.runs.disturbed FOLDER MOMENTS RECIPE key=value ...

MOMENTS names those of `support.runs.phases`. FOLDER is where that somebody leaves, at any time:

leash: the number of the last step that may be done; without it all may.
strike: where this process is to stop itself (SIGSTOP), for whatever is then done to it: a `Strike` as JSON. It is
    called `struck` as soon as it has stopped, or got its disk.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from isoloss.engine.run.preemption import Preemption
from isoloss.engine.run.run import Run
from isoloss.recipes import launch
from support.faults.faults import Operations
from support.runs.phases import MOMENTS, WRITING, watch


@dataclass(frozen=True)
class Strike:
    """The moment, which of its passings from now on, on which rank. disk: instead of a stop, a fault of the disk
    (`support.faults.faults`) at the operation `at` from there. id: another one for every strike."""

    moment: str
    passing: int = 1
    rank: int = 0
    disk: str | int | None = None
    at: int = 0
    id: str = field(default_factory=lambda: str(uuid.uuid4()))

    def leave_in(self, folder: Path) -> None:
        (folder / "strike.new").write_text(json.dumps(asdict(self)))
        (folder / "strike.new").rename(folder / "strike")


class Disturbed:
    def __init__(self, folder: Path):
        self._strike, self._struck, self._leash = (folder / name for name in ("strike", "struck", "leash"))
        self._rank = int(os.environ.get("RANK", 0))
        self._lock, self._passed = threading.Lock(), Counter[str]()

    def reached(self, moment: str) -> None:
        with self._lock:
            try:
                text = self._strike.read_text()
            except FileNotFoundError:
                return
            strike = Strike(**json.loads(text))
            if (strike.moment, strike.rank) != (moment, self._rank):
                return
            self._passed[strike.id] += 1
            if self._passed[strike.id] < strike.passing:
                return
            self._strike.rename(self._struck)
            if strike.disk is not None:
                Operations(strike.at, strike.disk).__enter__()
                return
        os.kill(os.getpid(), signal.SIGSTOP)

    def hold(self) -> None:
        """Have the run wait at the end of the leash, on its first rank, after a save that may be due."""
        log, received = Run.log, Preemption.received
        step = 0

        def logged(run: Run, *args: Any) -> None:
            nonlocal step
            log(run, *args)
            step = run.done + 1

        def received_in_time(preemption: Preemption) -> signal.Signals | None:
            while self._rank == 0 and step >= self._length() and not preemption._received:
                time.sleep(0.02)
            return received(preemption)

        Run.log, Preemption.received = logged, received_in_time

    def _length(self) -> float:
        with contextlib.suppress(FileNotFoundError):
            return int(self._leash.read_text())
        return float("inf")


def main(folder: Path, moments: str, recipe: str, argv: list[str]) -> int:
    disturbed = Disturbed(folder)
    disturbed.hold()
    watch((*MOMENTS[moments], WRITING), disturbed.reached)
    return launch.main(recipe, argv)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
