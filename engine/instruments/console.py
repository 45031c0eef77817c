"""What a run says to who started it."""

import contextlib
import sys


def say(*lines: str, error: bool = False) -> None:
    """Print at once, on standard error or output. A log on a full disk, or a terminal that is gone, ends no run."""
    with contextlib.suppress(OSError):
        print(*lines, sep="\n", file=sys.stderr if error else sys.stdout, flush=True)
