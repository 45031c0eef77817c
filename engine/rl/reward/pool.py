"""RewardWorker processes that call reward functions, and are killed where a call takes too long."""

import contextlib
import math
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from isoloss.parallel.runtime.errors import UserError
from isoloss.parallel.runtime.processes import Helper

WORKER = Path(__file__).with_name("worker.py")
START_SECONDS = 300.0  # for importing the functions, whatever they import
# What a worker says of a function: its parameters as (name, kind, required), or why it cannot be had.
Described = list[tuple[str, str, bool]] | str


class OutOfTime(str):
    """Why a call has no result: it took longer than reward.timeout."""


@dataclass(frozen=True)
class Call:
    """function: its number; batched: its result is a list."""

    function: int
    arguments: dict[str, Any]
    batched: bool = False


@dataclass
class RewardWorker:
    """call: the number of the one under way; None while the functions are imported, and when idle.
    deadline: when it is killed, in seconds of time.monotonic; infinity when idle."""

    process: Helper
    connection: Connection
    starting: bool = True
    call: int | None = None
    deadline: float = math.inf

    @property
    def idle(self) -> bool:
        return not self.starting and self.call is None

    def send(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # found when its answer is read
            self.connection.send(message)

    def kill(self) -> int:
        """End it and everything that it started; returns its exit status."""
        self.connection.close()
        return self.process.kill()


class RewardPool:
    """Processes that have imported `functions`.

    described: what they say of them, in that order.

    timeout: seconds for a call. To be used from one thread at a time. Closing ends the processes; they also end with
    this process, however it ends.
    """

    def __init__(self, functions: Sequence[str], num_workers: int, timeout: float):
        self._functions, self._timeout = list(functions), timeout
        self.described: list[Described] = []
        self._workers: list[RewardWorker] = []
        try:
            for _ in range(num_workers):
                self._start()
            while any(worker.starting for worker in self._workers):
                self._receive([])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        while self._workers:
            self._workers.pop().kill()

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """The result of each call, in their order, or, as text, why it has none: see worker.py."""
        try:
            return self._run(calls)
        except BaseException:  # answers to this run must not come up in another
            self.close()
            raise

    def _run(self, calls: Sequence[Call]) -> list[Any]:
        results: list[Any] = [None] * len(calls)
        waiting, done = deque(enumerate(calls)), 0
        while done < len(calls):
            for worker in [each for each in self._workers if each.idle]:
                if worker.connection.poll():  # nothing is due from it: it ended while it was idle
                    self._replace(worker, None)
                elif waiting:
                    worker.call, call = waiting.popleft()
                    worker.deadline = time.monotonic() + self._timeout
                    worker.send((call.function, call.arguments, call.batched))
            done += self._receive(results)
        return results

    def _start(self) -> None:
        here, there = Pipe()
        process = Helper(  # what functions print goes to standard error
            [sys.executable, str(WORKER), str(there.fileno())],
            pass_fds=[there.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        there.close()
        self._workers.append(RewardWorker(process, here, deadline=time.monotonic() + START_SECONDS))
        self._workers[-1].send(([os.getcwd(), *sys.path], self._functions))

    def _receive(self, results: list[Any]) -> int:
        """Wait until something happens; put what came into results. Returns how many calls have ended."""
        soonest = min(worker.deadline for worker in self._workers)
        connections: list[Any] = [worker.connection for worker in self._workers]
        ready = wait(connections, None if soonest == math.inf else max(0.0, soonest - time.monotonic()))
        done, now = 0, time.monotonic()
        for worker in list(self._workers):
            if worker.connection in ready:
                result: Any
                try:
                    result = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    result = self._replace(worker, None)
            elif now >= worker.deadline:
                limit = f"{START_SECONDS:g}" if worker.starting else f"reward.timeout={self._timeout:g}"
                result = OutOfTime(self._replace(worker, f"took longer than {limit} seconds"))
            else:
                continue
            if worker.call is not None:
                results[worker.call] = result
                done += 1
            elif worker.starting:
                self._check(result)
            worker.starting, worker.call, worker.deadline = False, None, math.inf
        return done

    def _check(self, described: list[Described]) -> None:
        if self.described and described != self.described:
            functions = ", ".join(self._functions)
            raise UserError(f"reward.function=[{functions}] changed in its files during the run: start the run again")
        self.described = described

    def _replace(self, worker: RewardWorker, why: str | None) -> str:
        """Start another one in its place; returns what became of it. why: None where it ended by itself."""
        if why is None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its connection closes just before it has its status
                worker.process.wait(timeout=10)
        status = worker.kill()
        if why is None:
            why = "ended its process " + (f"by signal {-status}" if status < 0 else f"with status {status}")
        self._workers.remove(worker)
        if worker.starting:
            functions = ", ".join(self._functions)
            raise UserError(f"reward.function=[{functions}] {why} while it was imported: see standard error above")
        self._start()
        return why
