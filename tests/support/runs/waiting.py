"""Waiting for what another process or thread does: as long as a busy machine takes, and not for ever."""

import time
from collections.abc import Callable
from typing import TypeVar

LONG = 120.0  # seconds: says that something hangs, never how fast it is
Found = TypeVar("Found")


def until(ask: Callable[[], Found], what: str, alive: Callable[[], bool] = lambda: True) -> Found:
    """What `ask` answers, once that is true.

    Raises AssertionError with the words `what` after LONG seconds, or once whoever was to bring it is not `alive`.
    """
    deadline = time.monotonic() + LONG
    while True:
        lives = alive()  # first: it may have brought it with its last breath
        if found := ask():
            return found
        assert lives, f"ended before {what}"
        assert time.monotonic() < deadline, f"not after {LONG:.0f} seconds: {what}"
        time.sleep(0.02)
