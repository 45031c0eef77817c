"""Try a piece of Python in a process of its own, because a library that does not fit may end the process."""

import subprocess
import sys

SECONDS = 120.0


def failure_of(code: str) -> str | None:
    """Return why `code` fails, in one line; None if it runs."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no end in {SECONDS:g} seconds"
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}"
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else lines[-1] if lines else f"status {done.returncode}"
