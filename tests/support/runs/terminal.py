"""A pseudo-terminal of a given width in this process, and what its screen shows."""

import codecs
import contextlib
import fcntl
import os
import re
import struct
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from isoloss.parallel.runtime import console

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


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int, name: str = "xterm-256color") -> Iterator[Terminal]:
    """Make standard output and error a terminal."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    os.set_blocking(master, False)
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
