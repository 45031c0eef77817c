"""The worker processes of `transfer`, seen from the process that has the plan."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TypeVar

from isoloss.models.conversion import worker_start
from isoloss.models.conversion.worker import CheckFile, WriteFile
from isoloss.parallel.errors import UserError
from isoloss.parallel.processes import Helper

T = TypeVar("T")


class Workers:
    """Worker processes, each with one job at a time."""

    def __init__(self, count: int, lock: int, mend: str):
        """lock: a descriptor that they inherit. mend: ends the line that tells of one that was killed."""
        self._mend = mend
        self._processes = {}
        for _ in range(count):
            here, there = Pipe()
            command = [sys.executable, "-IS", worker_start.__file__, str(there.fileno())]
            process = Helper(command, pass_fds=(there.fileno(), lock))
            there.close()
            self._processes[here] = process

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End them: they wait for a job, or their work is not wanted any more."""
        for connection, process in self._processes.items():
            process.kill()
            connection.close()
        self._processes.clear()

    def answers(
        self, jobs: Iterable[tuple[T, WriteFile | CheckFile]], progress: Callable[[int], object]
    ) -> Iterator[tuple[T, tuple]]:
        """The last answer to each job, as they come, with what stands beside the job.

        progress: is told how many bytes were done. Raises UserError where a worker is killed.
        """
        waiting, busy = iter(jobs), {}
        for connection in self._processes:
            self._send(connection, sys.path)
            self._next(connection, waiting, busy)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                file, job = busy[connection]
                try:
                    answer = connection.recv()
                except (EOFError, ConnectionResetError):
                    status = self._processes[connection].wait()
                    why = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
                    raise UserError(
                        f"a worker {why} at {job.path}; if memory ran out, give fewer workers; {self._mend}"
                    ) from None
                if answer[0] == "bytes":
                    progress(answer[1])
                else:
                    del busy[connection]
                    self._next(connection, waiting, busy)
                    yield file, answer

    def _next(self, connection: Connection, waiting: Iterator, busy: dict) -> None:
        if item := next(waiting, None):
            busy[connection] = item
            self._send(connection, item[1])

    @staticmethod
    def _send(connection: Connection, message: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # a worker that is gone is found when its answer is read
            connection.send(message)
