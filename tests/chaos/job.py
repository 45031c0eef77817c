"""A run of a recipe in processes of its own, to be disturbed, and what can be seen of it from outside."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from support.runs.disturbed import Strike
from support.runs.phases import MOMENTS, WRITING
from support.runs.runs import TIMES
from support.runs.waiting import LONG, until

from isoloss.engine.rl.backends.servers.fault_counts import NAMES as COUNTS
from isoloss.engine.run.records import read_rows

TESTS = Path(__file__).parents[1]
MARK = "ISOLOSS_TEST_MARK"
SECONDS_A_STEP = 3  # at most, of a long run on two cores with others beside it
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--max_restarts", "1000", "--nproc_per_node")


@dataclass(frozen=True)
class Kind:
    """What is run.

    moments: their name in `support.runs.phases`. keys: of the recipe, but for those of the job. ranks: under
    torchrun, 0 without. urls: where its servers are; networks: where trouble before each is made
    (tests/doubles/partition.py). server: the word that tells one from what watches it. files: of the run's folder,
    which an undisturbed run has alike. exact: it ends with the weights of an undisturbed run. max_staleness: of its
    tokens, in batches of `batch_steps` optimizer steps."""

    name: str
    moments: str
    recipe: str
    keys: tuple[str, ...]
    files: tuple[str, ...]
    ranks: int = 0
    urls: tuple[str, ...] = ()
    networks: tuple[Path, ...] = ()
    exact: bool = True
    server: str = ""
    max_staleness: int = 0
    batch_steps: int = 1


class Job:
    """One run, started as often as it takes with the same command.

    out: the run's folder. starts: how often it was started. newest: the step that it went on from at the last start.
    Its processes know each other by a mark in their environment, wherever in the tree of processes they are.
    """

    def __init__(self, kind: Kind, folder: Path, steps: int, keep: int):
        self.kind, self.folder, self.steps, self.keep = kind, folder, steps, keep
        self.out = folder / "out"
        self.starts, self.newest = 0, 0
        self._mark, self._process = str(uuid.uuid4()), None
        folder.mkdir()

    # ---- its life

    def start(self, newest: int | None = None) -> None:
        """newest: the checkpoint to go on from, if it is not the one with the highest number."""
        self.newest = self.newest_saved() if newest is None else newest
        (self.folder / "struck").unlink(missing_ok=True)
        keys = [*self.kind.keys, f"train.steps={self.steps}", f"checkpoint.keep={self.keep}", f"output_dir={self.out}"]
        launcher = [*TORCHRUN, str(self.kind.ranks)] if self.kind.ranks else []
        program = ["-m", "support.runs.disturbed", str(self.folder), self.kind.moments, self.kind.recipe]
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", MARK: self._mark}
        with open(self.folder / f"said-{self.starts:03d}", "w") as said:
            self._process = subprocess.Popen(
                [sys.executable, *launcher, *program, *keys, "checkpoint.resume=true"],
                env=os.environ | more,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        self.starts += 1

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self) -> int:
        """Its status, once it has ended by itself."""
        assert self._process is not None
        return self._process.wait(LONG)

    def wait_long(self) -> int:
        """The same, of all its steps."""
        assert self._process is not None
        return self._process.wait(LONG + SECONDS_A_STEP * self.steps)

    @staticmethod
    def kill(processes: Sequence[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        until(lambda: not any(map(_lives, processes)), "they were dead")

    def gone(self) -> None:
        """Its processes have ended, those that it started among them, and its servers' ports are free."""
        if self._process is not None:
            self._process.wait(LONG)
        until(lambda: not self.processes(), "nothing was left of the run")
        for url in self.kind.urls:
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0, f"{url} is still served"

    def end(self) -> None:
        """Whatever there is."""
        while left := self.processes():
            self.kill(left)
        if self._process is not None:
            self._process.wait()

    # ---- what can be seen of it

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["environ", "status"]):
            environ = process.info["environ"] or {}
            if environ.get(MARK) == self._mark and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def having(self, word: str) -> list[psutil.Process]:
        """Those of its processes that have this word in their command line, its first process first."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(word in part for part in process.cmdline()):
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def ranks(self) -> list[psutil.Process]:
        return [p for p in self.having("support.runs.disturbed") if "torch.distributed.run" not in p.cmdline()]

    def trainers(self) -> list[psutil.Process]:
        """The ranks and what started them: without the servers and the processes of rewards."""
        return self.having("support.runs.disturbed")

    def said(self, start: int = -1) -> str:
        """What it printed since its last start, or since that one."""
        return (self.folder / f"said-{range(self.starts)[start]:03d}").read_text(errors="replace")

    def rows(self, file: str) -> list[dict[str, Any]]:
        """Return the rows of a file of its folder, without times and counts of what was done to servers."""
        rows = read_rows(self.out / file) if (self.out / file).exists() else ()
        return [{key: value for key, value in row.items() if key not in (*TIMES, *COUNTS)} for row in rows]

    def done(self) -> int:
        """Steps that were told."""
        return max((row["step"] for row in self.rows("metrics.jsonl")), default=0)

    def saved(self) -> list[Path]:
        return sorted(self.out.glob("checkpoints/step_*"))

    def newest_saved(self) -> int:
        return int(self.saved()[-1].name.removeprefix("step_")) if self.saved() else 0

    # ---- what is done to it

    def leash(self, steps: int | None) -> None:
        """It may do so many more; None: all."""
        if steps is None:
            (self.folder / "leash").unlink(missing_ok=True)
        else:
            (self.folder / "leash.new").write_text(str(self.done() + steps))
            (self.folder / "leash.new").rename(self.folder / "leash")

    def strike(self, strike: Strike) -> psutil.Process | None:
        """Once it has struck: the process that stopped itself, or None where its disk was struck."""
        assert strike.moment in {each.name for each in (*MOMENTS[self.kind.moments], WRITING)}, strike.moment
        struck = self.folder / "struck"
        struck.unlink(missing_ok=True)
        strike.leave_in(self.folder)
        if not self.alive:
            self.start()
        until(struck.exists, f"it came to {strike}", lambda: self.alive)
        if strike.disk is not None:
            return None
        stopped: Callable[[], list[psutil.Process]] = lambda: [
            rank for rank in self.ranks() if rank.status() == psutil.STATUS_STOPPED
        ]
        return until(stopped, "a rank had stopped itself")[0]

    def goes_on(self) -> None:
        """It comes further than it was, whatever became of some of its processes."""
        before = self.done()
        self.leash(2)
        until(lambda: self.done() > before, f"it came further than step {before}", lambda: self.alive)

    @staticmethod
    def let_go(process: psutil.Process) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
