"""Commands of the front on rank 0: in the order of arrival, but for samples, which join the sampling that runs."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from isoloss.engine.rl.trajectory import Completion
from isoloss.parallel import UserError
from isoloss.tools.serve.commands import Cancel, Command, Failed, Sample, SampleRequest, Score

Numbered = tuple[int, Command]
Ended = Callable[[], None]
Begin = Callable[[SampleRequest], list[Future[Completion]]]


class Inbox:
    """A thread takes the commands from the connection. Outcomes go back under the numbers of their commands.

    elsewhere: starts samples that the ranks do not compute, while these do other work; None where they compute all.
    """

    def __init__(self, connection: Connection, elsewhere: Callable[[Sample], list[Future[Completion]]] | None = None):
        self._connection, self._elsewhere = connection, elsewhere
        # Re-entrant: a future that is cancelled calls back at once.
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[Numbered | None] = deque()
        # What is sampled at present: a version, how a request of it begins, and futures by number of the command.
        self._version: str | None = None
        self._begin: Begin | None = None
        self._running: dict[int, list[Future[Completion]]] = {}
        self._ids: set[str] = set()
        self._local: set[int] = set()  # of these the commands that the ranks compute
        self._goal: Future[None] = Future()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> list[Numbered] | None:
        """Wait for the next command; return it, with those that can be computed with it. None when the front ends."""
        with self._changed:
            while not self._waiting:
                self._changed.wait()
            first = self._waiting.popleft()
            if first is None:
                return None
            batch = [first]
            while isinstance(first[1], Score) and self._waiting and (head := self._waiting[0]) is not None:
                if not isinstance(head[1], Score) or head[1].version != first[1].version:
                    break
                batch.append(head)
                self._waiting.popleft()
            return batch

    def send(self, number: int, outcome: object) -> None:
        """Send the outcome of a command."""
        with self._changed:
            self._connection.send((number, outcome))

    def begin(self, first: Numbered, begin: Begin) -> Future[None]:
        """Begin to sample for a command and those that may join it. Return what is done when all of them are.

        begin: starts a request, and raises UserError for one that cannot be.
        """
        command = first[1]
        assert isinstance(command, Sample)
        with self._changed:
            self._version, self._begin, self._goal = command.version, begin, Future()
            goal = self._goal
            waiting: deque[Numbered | None] = deque([first, *self._waiting])
            while waiting and (head := waiting[0]) is not None and self._may_join(head[1]):
                self._join(*head)
                waiting.popleft()
            self._waiting = waiting
            self._end_if_done()
            return goal

    def _may_join(self, command: Command) -> bool:
        # Requests with one id, of clients that give the same seed, draw the same random numbers: one after the other.
        if not isinstance(command, Sample) or command.version != self._version:
            return False
        return self._ids.isdisjoint(command.request.ids)

    def _join(self, number: int, command: Command) -> None:
        assert isinstance(command, Sample) and self._begin is not None
        ids = command.request.ids

        def ended() -> None:
            self._ids.difference_update(ids)
            self._local.discard(number)
            self._end_if_done()

        self._ids.update(ids)
        self._local.add(number)
        self._start(number, command.request, self._begin, ended)

    def _start(self, number: int, request: Any, begin: Callable[[Any], list[Future[Completion]]], ended: Ended) -> None:
        """Begin with the completions of a command; send them once all are there, and call `ended`."""
        try:
            futures = begin(request)
        except UserError as error:
            self.send(number, Failed(str(error)))
            ended()
            return
        self._running[number] = futures
        left = len(futures)

        def one_ended(_: Future[Completion]) -> None:
            nonlocal left
            with self._changed:
                left -= 1
                if left == 0:
                    del self._running[number]
                    self._send_completions(number, futures)
                    ended()

        for future in futures:
            future.add_done_callback(one_ended)

    def _send_completions(self, number: int, futures: Sequence[Future[Completion]]) -> None:
        if any(future.cancelled() for future in futures):
            return
        failures = [error for future in futures if (error := future.exception()) is not None]
        if not failures:
            self.send(number, [_numbers(future.result()) for future in futures])
        elif isinstance(failures[0], UserError):  # others end the ranks
            self.send(number, Failed(str(failures[0])))

    def _end_if_done(self) -> None:
        if not self._local and self._version is not None:
            self._version = None
            self._goal.set_result(None)

    def _read(self) -> None:
        while True:
            try:
                number, command = self._connection.recv()
            except (EOFError, OSError):
                number, command = 0, None
            with self._changed:
                if isinstance(command, Cancel):
                    self._cancel(number)
                elif isinstance(command, Sample) and self._elsewhere is not None:
                    self._start(number, command, self._elsewhere, lambda: None)
                elif command is not None and not self._waiting and self._may_join(command):
                    self._join(number, command)
                else:
                    self._waiting.append(None if command is None else (number, command))
                    self._changed.notify_all()
            if command is None:
                return

    def _cancel(self, number: int) -> None:
        for future in self._running.get(number, ()):
            future.cancel()
        self._waiting = deque(each for each in self._waiting if each is None or each[0] != number)


def _numbers(completion: Completion) -> tuple[np.ndarray, np.ndarray, str]:
    tokens, logprobs = np.asarray(completion.tokens, np.int32), np.asarray(completion.logprobs, np.float32)
    return tokens, logprobs, completion.finish
