"""Print what a run reports to its user: lines, and on a terminal a live part below them."""

import contextlib
import io
import os
import shutil
import sys
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TextIO

from isoloss.parallel.runtime import environment

if TYPE_CHECKING:  # its import takes a tenth of a second, which commands that draw nothing need not wait for
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

LIVE_SECONDS, REDRAW_SECONDS = 2.0, 0.1  # seconds before a task appears on a terminal, and between two drawings
LAST_LINES_SECONDS = 1.0  # for what other processes printed before their end
FIRST_SECONDS, EVERY_SECONDS = 5.0, 10.0  # seconds before the first line about a task in a log file, and between two


def say(*lines: str, error: bool = False) -> None:
    """Print lines to standard output or error, and flush. A full disk or a closed terminal is ignored.

    On a terminal they stand above the live part.
    """
    stream = sys.stderr if error else sys.stdout
    with contextlib.suppress(OSError):
        _terminal.write(stream, "".join(f"{line}\n" for line in lines))


def is_live() -> bool:
    """Return whether the terminal has a live part."""
    return _terminal.is_live()


def leave() -> None:
    """Leave all live parts on the screen as they are: see `LivePart.leave`."""
    _terminal.leave_all()


class Relay:
    """Takes what other processes print, whole lines of which go to standard error, above the live part.

    descriptor: their standard output and error. Standard error itself if that is no terminal.
    """

    def __init__(self) -> None:
        self.descriptor, self._thread = 2, None
        if on_terminal():
            lines, self.descriptor = os.pipe()
            self._thread = threading.Thread(target=_pass_on, args=(lines,), name="relay", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait a moment for the last lines. The processes have ended, but may have left others."""
        if self._thread is not None:
            os.close(self.descriptor)
            self._thread.join(LAST_LINES_SECONDS)
            self._thread = None


def _pass_on(descriptor: int) -> None:
    with open(descriptor, encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            say(line.removesuffix("\n"), error=True)


def on_terminal() -> bool:
    """Return whether standard error is a terminal that can redraw a part of itself."""
    return sys.stderr.isatty() and environment.variable("TERM") not in (None, "", "dumb", "unknown")


class LivePart:
    """A part of the terminal that is redrawn in place, below all lines. Several parts stand one below the other.

    passing: whether the part vanishes when a line is printed, until it is drawn again. So nothing is left of a task
        that nobody closed.
    """

    def __init__(self, passing: bool = False):
        self.passing = passing
        self._drawn = 0.0

    def draw(self, drawing: "RenderableType", now: bool = False) -> None:
        """Draw the part. now: also if it was drawn less than REDRAW_SECONDS ago. A closed terminal is ignored."""
        if now or monotonic() - self._drawn >= REDRAW_SECONDS:
            self._drawn = monotonic()
            with contextlib.suppress(OSError):
                _terminal.show(self, drawing)

    def remove(self) -> None:
        """Take the part away."""
        with contextlib.suppress(OSError):
            _terminal.remove(self)

    def leave(self) -> None:
        """Leave the part on the screen as it is. Writes nothing: the last lines may be another process's by now."""
        _terminal.leave(self)


class _Terminal:
    """Owns the end of the terminal's output, for all threads of the process.

    Between two drawings the cursor is visible, in the first column of an empty line below the live parts. So whatever
    ends the process leaves a terminal that a shell can use. While there are parts, what this process prints to the
    terminal by `sys.stdout` and `sys.stderr` goes above them.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._parts: dict[LivePart, RenderableType] = {}
        self._height = 0  # lines of the live parts on the screen
        self._streams: list[tuple[str, Any, Any]] = []

    def write(self, stream: TextIO, text: str) -> None:
        """Print whole lines to a stream, above the parts if it is a terminal."""
        stream = getattr(stream, "real", stream)
        with self._lock:
            if self._height and stream.isatty():
                self._parts = {part: drawing for part, drawing in self._parts.items() if not part.passing}
                self._redraw(text, stream)
            else:
                print(text, end="", file=stream, flush=True)

    def show(self, part: LivePart, drawing: "RenderableType") -> None:
        with self._lock:
            self._parts[part] = drawing
            self._redraw()

    def remove(self, part: LivePart) -> None:
        with self._lock:
            if self._parts.pop(part, None) is not None:
                self._redraw()

    def leave(self, part: LivePart) -> None:
        with self._lock:
            if self._parts.pop(part, None) is not None:
                self._height = 0  # what stands there is never erased; another part is drawn below
                if not self._parts:
                    self._restore_streams()

    def leave_all(self) -> None:
        with self._lock:
            for part in list(self._parts):
                self.leave(part)

    def is_live(self) -> bool:
        return self._height > 0

    def _redraw(self, text: str = "", stream: TextIO | None = None) -> None:
        """Replace the parts on the screen by `text` and the parts of now, in one write."""
        erase = f"\r\x1b[{self._height}A\x1b[J" if self._height else ""
        if self._parts:
            self._take_streams()
        terminal: TextIO = getattr(sys.stderr, "real", sys.stderr)
        drawn = _drawn(list(self._parts.values()), terminal) if self._parts else ""
        self._height = drawn.count("\n")
        print(erase, text, drawn, sep="", end="", file=stream or terminal, flush=True)
        if not self._parts:
            self._restore_streams()

    def _take_streams(self) -> None:
        for name in ("stdout", "stderr") if not self._streams else ():
            stream = getattr(sys, name)
            if stream.isatty():
                above = _Above(stream)
                self._streams.append((name, stream, above))
                setattr(sys, name, above)

    def _restore_streams(self) -> None:
        for name, stream, above in self._streams:
            if getattr(sys, name) is above:
                setattr(sys, name, stream)
            above.finish()
        self._streams = []


class _Above:
    """Stands for a stream while there are live parts: whole lines go above them. real: the stream."""

    def __init__(self, real: TextIO):
        self.real, self._rest = real, ""

    def write(self, text: str) -> int:
        whole, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            _terminal.write(self.real, whole + newline)
        return len(text)

    def finish(self) -> None:
        """Write the beginning of a line that did not end."""
        rest, self._rest = self._rest, ""
        if rest:
            self.real.write(rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def terminal_size(stream: TextIO) -> os.terminal_size:
    """Return columns and lines of the terminal of a stream."""
    with contextlib.suppress(OSError):
        size = os.get_terminal_size(stream.fileno())
        if size.columns and size.lines:
            return size
    return shutil.get_terminal_size()


def _drawn(drawings: "list[RenderableType]", terminal: TextIO) -> str:
    """Return the lines of drawings, at most as many as the terminal has above the cursor."""
    from rich.console import Console, Group

    size = terminal_size(terminal)
    # The width leaves a column free: in the last one some terminals wrap at once.
    shape: Any = {"width": max(1, size.columns - 1), "height": size.lines, "force_terminal": True}
    console = Console(file=_Encoded(terminal.encoding), **shape, highlight=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(Group(*drawings))
    return "".join(captured.get().splitlines(keepends=True)[: max(1, size.lines - 1)])


class _Encoded(io.StringIO):
    """A text file with the encoding of another one, by which rich chooses its characters."""

    def __init__(self, encoding: str | None):
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:
        return self._encoding or "utf-8"


_terminal = _Terminal()  # a process has one


class _Task:
    """Reports how far something is on standard error: on a terminal by a bar after LIVE_SECONDS, which vanishes at the
    end or at the next line; in a log file by a line after FIRST_SECONDS, then one every EVERY_SECONDS. A context
    manager, whose end takes the bar away."""

    def __init__(self, enabled: bool):
        self._enabled, self._started = enabled, monotonic()
        self._live = LivePart(passing=True) if enabled and on_terminal() else None
        self._next = self._started + (FIRST_SECONDS if self._live is None else LIVE_SECONDS)

    def _due(self) -> float | None:
        """Return the seconds so far if a report is due."""
        now = monotonic()
        if not self._enabled or now < self._next:
            return None
        self._next = now + (EVERY_SECONDS if self._live is None else REDRAW_SECONDS)
        return now - self._started

    def _report(self, before: str, share: float, after: str) -> None:
        if self._live is None:
            say(f"{before}  {after}", error=True)
        else:
            self._live.draw(Bar(before, share, after), now=True)

    def close(self) -> None:
        """Take the bar away. May be called again."""
        if self._live is not None:
            self._live.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class Progress(_Task):
    """Reports the progress of a task that does items: see `_Task`. The last item takes the bar away too.

    what, items: words for the line, such as "tokenizing" and "rows of data.train".
    count: function that returns the number of items, called for the first line.
    done: number of items that were done before.
    nbytes: whether an item is a byte; lines have MB or GB.
    """

    def __init__(
        self,
        what: str,
        items: str,
        count: Callable[[], int],
        enabled: bool = True,
        done: int = 0,
        *,
        nbytes: bool = False,
    ):
        super().__init__(enabled)
        self._what, self._items, self._count, self._nbytes = what, items, count, nbytes
        self._done, self._before, self._total = done, done, 0

    def skip(self, number: int) -> None:
        """Count `number` more items as done before, which took no time."""
        self._before += number
        self.advance(number)

    def advance(self, number: int = 1) -> None:
        """Count `number` more items as done."""
        self._done += number
        if 0 < self._total <= self._done:
            self.close()
        if self._done == self._before or (seconds := self._due()) is None:
            return
        self._total = self._total or self._count()
        if self._live is None or self._done < self._total:
            rate = (self._done - self._before) / max(seconds, 1e-3)
            left = duration(max(0, self._total - self._done) / rate)
            done, total, items = f"{self._done:,}", f"{self._total:,}", self._items
            speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
            if self._nbytes:
                unit, size = ("GB", 1e9) if self._total >= 1e9 else ("MB", 1e6)
                done, total, speed = (f"{number / size:,.2f}" for number in (self._done, self._total, rate))
                items, speed = f"{unit} {items}".rstrip(), f"{speed} {unit}"
            self._report(
                f"{self._what} {done} of {total} {items}", self._done / self._total, f"{speed} a second  ETA {left}"
            )


class Wait(_Task):
    """Reports how long something has been waited for: see `_Task`.

    what: words for the line, such as "waiting for a server".
    limit: seconds after which nobody waits any more.
    """

    def __init__(self, what: str, limit: float):
        super().__init__(enabled=True)
        self._what, self._limit = what, limit

    def look(self) -> None:
        """Report, if it is time. Called again and again."""
        if (seconds := self._due()) is not None:
            self._report(self._what, min(1.0, seconds / self._limit), f"{duration(seconds)} of {duration(self._limit)}")


class Bar:
    """A line with a bar between two texts. Without room for it, the texts alone, on one line or on two.

    share: 0 to 1.
    """

    LEAST = 10  # columns of a bar

    def __init__(self, before: str, share: float, after: str):
        self._before, self._share, self._after = before, share, after

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        room = options.max_width - len(self._before) - len(self._after) - 4
        if room < self.LEAST:
            joint = "  " if room >= -2 else "\n"
            yield Text(f"{self._before}{joint}{self._after}", overflow="fold")
            return
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_row(Text(self._before), ProgressBar(1.0, self._share, width=room), Text(self._after))
        yield table


def duration(seconds: float) -> str:
    """Return seconds as "hours:minutes:seconds"."""
    left = round(seconds)
    return f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
