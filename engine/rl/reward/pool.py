"""RewardWorker processes that call reward functions, and are killed where a call takes too long."""

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from isoloss.parallel.runtime import environment
from isoloss.parallel.runtime.console import Relay
from isoloss.parallel.runtime.errors import UserError
from isoloss.parallel.runtime.processes import Helper

WORKER = Path(__file__).with_name("worker.py")
START_SECONDS = 300.0  # for importing the functions, whatever they import
MOST_BYTES = 64 << 20  # of an answer: the rewards of a whole batch
# What a worker says of a function: its parameters as [name, kind, required], or why it cannot be had.
Described = list[list[Any]] | str


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
    """answers: the descriptor that it writes them to, a line of JSON each; received: what came of the next one.
    call: the number of the one under way; None while the functions are imported, and when idle.
    deadline: when it is killed, in seconds of time.monotonic; infinity when idle."""

    process: Helper
    connection: Connection
    answers: int
    received: bytearray = field(default_factory=bytearray)
    starting: bool = True
    call: int | None = None
    deadline: float = math.inf

    @property
    def idle(self) -> bool:
        return not self.starting and self.call is None

    def send(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # found when its answer is read
            self.connection.send(message)

    def receive(self) -> str | None:
        """Read the available part of the answer, without waiting; return the line once it is whole. Raise EOFError if
        the worker has ended, and ValueError if it sends what is no answer."""
        piece = os.read(self.answers, 1 << 16)
        if not piece:
            raise EOFError
        self.received += piece
        line, end, rest = self.received.partition(b"\n")
        if rest or len(line) > MOST_BYTES:
            raise ValueError("sent more than an answer")
        if not end:
            return None
        self.received.clear()
        return line.decode()

    def kill(self) -> int:
        """End it and everything that it started; returns its exit status."""
        self.connection.close()
        os.close(self.answers)
        return self.process.kill()


def is_answer(value: Any) -> bool:
    """Return whether worker.py may answer so: a finite number, a reason, or a list of these and None."""
    if isinstance(value, list):
        return all(each is None or (not isinstance(each, list) and is_answer(each)) for each in value)
    return isinstance(value, str) or (type(value) in (int, float) and math.isfinite(value))


class RewardPool:
    """Processes that have imported `functions`.

    described: descriptions of the functions by the processes, in that order.

    timeout: seconds for a call. hidden: a variable of the environment that they are not to know.
    To be used from one thread at a time. Closing ends the processes; they also end with this process, however it ends.
    """

    def __init__(self, functions: Sequence[str], num_workers: int, timeout: float, hidden: str | None = None):
        self._functions, self._timeout, self._hidden = list(functions), timeout, hidden
        self.described: list[Described] = []
        self._workers: list[RewardWorker] = []
        self._printed = Relay()
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
        self._printed.close()

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
                if wait([worker.answers], 0):  # nothing is due from it: it ended while it was idle
                    self._replace(worker, None)
                elif waiting:
                    worker.call, call = waiting.popleft()
                    worker.deadline = time.monotonic() + self._timeout
                    worker.send((call.function, call.arguments, call.batched))
            done += self._receive(results)
        return results

    def _start(self) -> None:
        here, there = Pipe()
        answers, written = os.pipe()
        process = Helper(
            [sys.executable, str(WORKER), str(there.fileno()), str(written)],
            stdout=self._printed.descriptor,
            pass_fds=[there.fileno(), written],
            env={**environment.of_other_programs(self._hidden), "OMP_NUM_THREADS": "1"},
        )
        there.close()
        os.close(written)
        self._workers.append(RewardWorker(process, here, answers, deadline=time.monotonic() + START_SECONDS))
        self._workers[-1].send(([os.getcwd(), *sys.path], self._functions))

    def _receive(self, results: list[Any]) -> int:
        """Wait until something happens; put what came into results. Returns how many calls have ended."""
        soonest = min(worker.deadline for worker in self._workers)
        ready = wait(
            [worker.answers for worker in self._workers],
            None if soonest == math.inf else max(0.0, soonest - time.monotonic()),
        )
        done, now = 0, time.monotonic()
        for worker in list(self._workers):
            result: Any
            if worker.answers in ready:
                try:
                    line = worker.receive()
                    if line is None:
                        continue
                    result = json.loads(line)
                    if not worker.starting and not is_answer(result):
                        raise ValueError("neither numbers nor reasons")
                except (EOFError, ConnectionResetError):
                    result = self._replace(worker, None)
                except (ValueError, RecursionError):
                    result = self._replace(worker, "answered what is no reward")
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
