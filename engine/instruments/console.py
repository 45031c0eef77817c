"""What a run says to who started it."""

import contextlib
import sys
from collections.abc import Callable
from time import monotonic

FIRST_SECONDS, EVERY_SECONDS = 5.0, 10.0  # after which a long task tells how far it is


def say(*lines: str, error: bool = False) -> None:
    """Print at once, on standard error or output. A log on a full disk, or a terminal that is gone, ends no run."""
    stream = sys.stderr if error else sys.stdout
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    with contextlib.suppress(OSError):
        if tqdm is not None and getattr(tqdm, "_instances", None):  # a bar is on the terminal: the lines go above it
            tqdm.write("\n".join(lines), file=stream)
            stream.flush()
        else:
            print(*lines, sep="\n", file=stream, flush=True)


class Progress:
    """How far a task is that may take long: a line after FIRST_SECONDS, and one every EVERY_SECONDS.

    what: "tokenizing", of so many `items`.
    count: how many there are, asked for with the first line.
    """

    def __init__(self, what: str, items: str, count: Callable[[], int], enabled: bool = True):
        self._what, self._items, self._count, self._enabled = what, items, count, enabled
        self._done, self._total = 0, 0
        self._started = monotonic()
        self._next = self._started + FIRST_SECONDS

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        now = monotonic()
        if not self._enabled or now < self._next:
            return
        self._next = now + EVERY_SECONDS
        self._total = self._total or self._count()
        left = duration((now - self._started) / self._done * (self._total - self._done))
        say(f"{self._what} {self._done:,} of {self._total:,} {self._items}  ETA {left}", error=True)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    left = round(seconds)
    return f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
