"""What a run says to who started it."""

import contextlib
import sys


def say(*lines: str, error: bool = False) -> None:
    """Print at once, on standard error or output. A log on a full disk, or a terminal that is gone, ends no run."""
    stream = sys.stderr if error else sys.stdout
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    with contextlib.suppress(OSError):
        if getattr(tqdm, "_instances", None):  # a bar is on the terminal: the lines go above it
            tqdm.write("\n".join(lines), file=stream)
            stream.flush()
        else:
            print(*lines, sep="\n", file=stream, flush=True)
