"""Processes that run agents. They say what comes from them to one listener, in one thread."""

import contextlib
import json
import os
import queue
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isoloss.parallel.runtime import environment
from isoloss.parallel.runtime.console import Relay
from isoloss.parallel.runtime.errors import UserError
from isoloss.parallel.runtime.processes import Helper

WORKER = Path(__file__).with_name("worker.py")
START_SECONDS = 300.0  # for importing the function, whatever it imports
MOST_BYTES = 64 << 20  # of a line: the whole conversation


class AgentWorker:
    """A process with sessions. events: queue that gets (worker, line), the line None when the process has ended."""

    def __init__(self, command: list[str], first: Mapping[str, Any], stdout: int, hidden: str | None, events: Any):
        there, here = os.pipe()
        answers, written = os.pipe()
        try:
            self.process = Helper(
                [*command, str(there), str(written)],
                stdout=stdout,
                pass_fds=[there, written],
                env={**environment.of_other_programs(hidden), "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            raise UserError(f"environment.python={command[0]} cannot be started ({error}): correct it") from error
        finally:
            os.close(there)
            os.close(written)
        self.sessions: set[str] = set()
        self._to = os.fdopen(here, "w", buffering=1)
        self._from = os.fdopen(answers, "rb")
        self.send(first)
        threading.Thread(target=self._listen, args=(events,), name="agents", daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):  # its end is on the way to the listener
            self._to.write(json.dumps(message, default=repr) + "\n")

    def kill(self) -> int:
        """End it and everything that it started; returns its exit status."""
        with contextlib.suppress(BrokenPipeError):
            self._to.close()
        return self.process.kill()

    def _listen(self, events: Any) -> None:
        with contextlib.suppress(ValueError, RecursionError), self._from as lines:
            while line := lines.readline(MOST_BYTES):
                events.put((self, json.loads(line)))
        events.put((self, None))


class AgentPool:
    """Processes that have imported the function of environment.program.

    python: interpreter of the processes; None: this one, with its sys.path.
    hidden: a variable of the environment that they are not to know.
    Closing ends the processes; they also end with this process, however it ends.
    Raises UserError where the function cannot be loaded.
    """

    def __init__(self, program: str, workers: int, python: str | None, hidden: str | None = None):
        self._program, self._python, self._hidden = program, python, hidden
        self._printed = Relay()
        self.events: queue.Queue[tuple[AgentWorker | None, Any]] = queue.Queue()
        self.workers: list[AgentWorker] = []
        try:
            for _ in range(workers):
                self._start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        while self.workers:
            self.workers.pop().kill()
        self._printed.close()

    def begin(self, session: str, row: Mapping[str, Any], seed: int, url: str | None, key: str) -> AgentWorker:
        """Begin a session in the process that has the fewest. url, key: of the endpoint, if there is one."""
        worker = min(self.workers, key=lambda each: len(each.sessions))
        worker.sessions.add(session)
        worker.send({"begin": session, "row": row, "seed": seed, "url": url, "key": key})
        return worker

    def replace(self, worker: AgentWorker) -> str:
        """Start another process in place of one that has ended or is to end; return what became of it."""
        status = worker.kill()
        self.workers.remove(worker)
        self._start()
        return "its process ended " + (f"by signal {-status}" if status < 0 else f"with status {status}")

    def _start(self) -> None:
        own = [os.getcwd(), *sys.path] if self._python is None else None
        # The answer about the function comes first, before the process has any session.
        answers: queue.Queue[tuple[AgentWorker, Any]] = queue.Queue()
        events = Forwarded(answers, self.events)
        command = [self._python or sys.executable, str(WORKER)]
        first = {"path": own, "function": self._program}
        worker = AgentWorker(command, first, self._printed.descriptor, self._hidden, events)
        try:
            _, ready = answers.get(timeout=START_SECONDS)
        except queue.Empty:
            ready = {"ready": f"takes longer than {START_SECONDS:g} seconds to import"}
        if ready is None or ready["ready"] is not None:
            status = worker.kill()
            why = f"ended its process with status {status} while it was imported" if ready is None else ready["ready"]
            raise UserError(f"environment.program={self._program} {why}")
        self.workers.append(worker)


class Forwarded:
    """A queue for the first event of a process, and another one for those after it."""

    def __init__(self, first: Any, others: Any):
        self._first, self._others, self._begun = first, others, False

    def put(self, event: Any) -> None:
        (self._others if self._begun else self._first).put(event)
        self._begun = True
