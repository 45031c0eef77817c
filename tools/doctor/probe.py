"""Whether a piece of Python runs here: in a process of its own, for a library that does not fit may end it."""

import subprocess
import sys

SECONDS = 120.0


def failure_of(code: str) -> str | None:
    """Why `code` fails, in one line; None where it runs."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no end in {SECONDS:g} seconds"
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}"
    told = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else told[-1] if told else f"status {done.returncode}"
