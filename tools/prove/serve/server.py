"""Start `isoloss-serve`, kill parts of it, and start it again."""

import contextlib
import os
import random
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from isoloss.parallel import UserError
from isoloss.parallel.runtime.processes import Helper
from isoloss.tools.prove.serve.connection import SessionError

SERVER = "isoloss.tools.serve"
VICTIMS = ("front", "rank", "all")
MISTAKE = 2  # exit status of a server whose configuration is wrong


class Server:
    """A server in processes of its own. words: keys of its configuration. folder: what it writes.

    again: whether it is started again where it ends, as an operator would.
    status: its exit status after the `with` block.
    """

    def __init__(self, words: Sequence[str], folder: Path, *, again: bool = False):
        self.key, self._again, self._lock = f"tml-{secrets.token_hex(16)}", again, threading.Lock()
        self.log, keys = folder / "log", folder / "keys"
        folder.mkdir(parents=True)
        keys.touch(0o600)
        keys.write_text(f"{self.key}\n")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        own = (f"serve.api_keys={keys}", f"serve.port={port}", f"output_dir={folder / 'run'}")
        self._command = [sys.executable, "-m", SERVER, *words, *own]
        self._helper, self.status = self._start(), None

    @property
    def pid(self) -> int:
        """Return the id of the process that starts the others."""
        return self._helper.pid

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._again = False
        try:
            if self._helper.poll() is None:
                os.kill(self._helper.pid, signal.SIGTERM)
            self.status = self._helper.wait(60)
        finally:
            self._helper.kill()

    def wait_ready(self) -> None:
        """Wait until it answers, however long. Raises what `check` does."""
        while "ready" not in self.log.read_text():
            self.check()
            time.sleep(0.2)

    def check(self) -> None:
        """Start the server again if it has ended and may. Raises SessionError where it has ended and may not, and
        UserError for a mistake in its configuration."""
        with self._lock:
            status = self._helper.poll()
            if status is None:
                return
            if status == MISTAKE:
                raise UserError(self._last_line().removeprefix("isoloss: error: "))
            if not self._again:
                raise SessionError(f"the server ended with status {status}: {self._last_line()}")
            self._helper.kill()
            self._helper = self._start()

    def repeated_otherwise(self) -> bool:
        """Return whether the server says that a request had another result when it was repeated."""
        return "repeated with another result" in self.log.read_text()

    def kill(self, victim: str, choice: random.Random) -> None:
        """Send SIGKILL to the front, to one rank, or to all processes."""
        try:
            supervisor = psutil.Process(self._helper.pid)
            children = [(each, " ".join(each.cmdline())) for each in supervisor.children()]
            fronts = [each for each, line in children if f"{SERVER}.front" in line]
            launchers = [each for each, line in children if "torch.distributed.run" in line]
            below = [each for launcher in launchers for each in launcher.children()]
            ranks = [each for each in below if SERVER in " ".join(each.cmdline())]
            everything = [supervisor, *supervisor.children(recursive=True)]
        except psutil.Error:  # a part is down already
            return
        chosen = {"front": fronts, "rank": [choice.choice(ranks)] if ranks else [], "all": everything}[victim]
        for process in chosen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _start(self) -> Helper:
        with self.log.open("a") as log:
            return Helper(self._command, stdout=log.fileno())

    def _last_line(self) -> str:
        lines = [line for line in self.log.read_text().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "error" in line]
        return (errors or lines or ["it said nothing"])[-1].strip()


class Killer:
    """Kills at points of a session: up to a second after a given number of answers.

    points: numbers of answers, ascending. victims: parts of the server that are killed, in turn.
    """

    def __init__(self, server: Server, points: Sequence[int], seed: int, victims: Sequence[str] = VICTIMS):
        self._server, self._points, self._victims = server, [*points], victims
        self._choice, self._lock, self._answers = random.Random(seed), threading.Lock(), 0
        self._timers: list[threading.Timer] = []

    def heard(self) -> None:
        """Count an answer."""
        with self._lock:
            self._answers += 1
            if not self._points or self._answers < self._points[0]:
                return
            self._points.pop(0)
            victim = self._victims[len(self._timers) % len(self._victims)]
            timer = threading.Timer(self._choice.random(), self._server.kill, (victim, self._choice))
            self._timers.append(timer)
        timer.start()

    def kills(self) -> int:
        """Wait for the last kill, and return their number."""
        for timer in self._timers:
            timer.join()
        return len(self._timers)
