"""Print what a run reports to its user."""

import contextlib
import sys
from collections.abc import Callable
from time import monotonic

FIRST_SECONDS, EVERY_SECONDS = 5.0, 10.0  # seconds before the first progress line, and between two


def say(*lines: str, error: bool = False) -> None:
    """Print lines to standard output or error, and flush. A full disk or a closed terminal is ignored."""
    stream = sys.stderr if error else sys.stdout
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    with contextlib.suppress(OSError):
        if tqdm is not None and getattr(tqdm, "_instances", None):  # prints above a progress bar
            tqdm.write("\n".join(lines), file=stream)
            stream.flush()
        else:
            print(*lines, sep="\n", file=stream, flush=True)


class Progress:
    """Reports the progress of a long task: a line after FIRST_SECONDS, then one every EVERY_SECONDS.

    what, items: words for the line, such as "tokenizing" and "rows of data.train".
    count: function that returns the number of items, called for the first line.
    """

    def __init__(self, what: str, items: str, count: Callable[[], int], enabled: bool = True):
        self._what, self._items, self._count, self._enabled = what, items, count, enabled
        self._done, self._total = 0, 0
        self._started = monotonic()
        self._next = self._started + FIRST_SECONDS

    def advance(self, count: int = 1) -> None:
        """Count more items as done."""
        self._done += count
        now = monotonic()
        if not self._enabled or now < self._next:
            return
        self._next = now + EVERY_SECONDS
        self._total = self._total or self._count()
        left = duration((now - self._started) / self._done * (self._total - self._done))
        say(f"{self._what} {self._done:,} of {self._total:,} {self._items}  ETA {left}", error=True)


def duration(seconds: float) -> str:
    """Return seconds as "hours:minutes:seconds"."""
    left = round(seconds)
    return f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
