"""A pseudo-terminal of a given width in this process, and what its screen shows."""

import codecs
import contextlib
import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import pytest

from isoloss.parallel.runtime import console
from support.runs.waiting import until

CODE = re.compile(r"\x1b\[([\d;?]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n])")


@dataclass
class Terminal:
    """The part of a VT100 that live views use. Another code than these fails.

    lines: what was written so far, in lines of at most `columns`. row, column: of the cursor.
    """

    columns: int
    master: int
    lines: list[str] = field(default_factory=lambda: [""])
    row: int = 0
    column: int = 0
    raw: str = ""
    decoder: codecs.IncrementalDecoder = field(default_factory=codecs.getincrementaldecoder("utf-8"))

    def read(self) -> list[str]:
        """Read what was written since, and return all lines without blanks at their ends."""
        with contextlib.suppress(BlockingIOError):
            while more := self.decoder.decode(os.read(self.master, 65536)):
                self.raw += more
                for code in CODE.finditer(more):
                    self._take(*code.groups())
        return [line.rstrip() for line in self.lines]

    def _take(self, number: str | None, code: str | None, back: str | None, down: str | None, letter: str) -> None:
        if back:
            self.column = 0
        elif down:
            self._down()
        elif letter:
            if self.column == self.columns:
                self._down()
                self.column = 0
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
            self.column += 1
        elif code == "A":
            self.row = max(0, self.row - int(number or 1))
        elif code == "J":
            assert not number
            self.lines[self.row :] = [self.lines[self.row][: self.column]]
        else:
            assert code == "m", f"another code: {number}{code}"

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")


class Session:
    """A module that runs as from a shell in a terminal of its own.

    words: the module and its words. popen: of `subprocess` or of `warm`.
    """

    def __init__(self, words: Sequence[str], columns: int, popen: type[subprocess.Popen], **environment: str):
        master, slave = _open(columns)
        self.terminal, self._slave = Terminal(columns, master), slave
        self._modes = termios.tcgetattr(slave)
        self.process = popen(
            [sys.executable, "-m", "support.runs.at_terminal", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm-256color"} | environment,
        )

    def shows(self, pattern: str) -> list[str]:
        """Wait until a line on the screen matches; return all lines."""

        def found() -> list[str] | None:
            lines = self.terminal.read()
            assert self.process.poll() is None or any(re.search(pattern, line) for line in lines), "\n".join(lines)
            return lines if any(re.search(pattern, line) for line in lines) else None

        return until(found, f"the screen shows {pattern}") or []

    def type(self, text: str) -> None:
        os.write(self.terminal.master, text.encode())

    def ended(self) -> tuple[int, list[str]]:
        """Wait for the end; return the exit status and the lines on the screen, of a terminal that a shell can use."""
        until(lambda: [self.terminal.read(), self.process.poll() is not None][1], "the process ended")
        lines = self.terminal.read()
        assert termios.tcgetattr(self._slave) == self._modes
        assert (self.terminal.row, self.terminal.column) == (len(lines) - 1, 0) and lines[-1] == ""
        return self.process.returncode, lines

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._slave)
        os.close(self.terminal.master)


def _open(columns: int) -> tuple[int, int]:
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    os.set_blocking(master, False)
    return master, slave


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int, name: str = "xterm-256color") -> Iterator[Terminal]:
    """Make standard output and error a terminal."""
    master, slave = _open(columns)
    monkeypatch.setenv("TERM", name)
    for variable in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(console, "_terminal", console._Terminal())  # another test may have left a part
    with os.fdopen(os.dup(slave), "w", encoding="utf-8") as out, os.fdopen(slave, "w", encoding="utf-8") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        yield Terminal(columns, master)
        monkeypatch.undo()
    os.close(master)
