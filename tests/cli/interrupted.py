"""A run of the sft recipe that says "ready" and then hangs in C, where Python runs no handler of a signal:

python -m cli.interrupted loading|training

Or one that trains, and hangs after it received a signal to end:

python -m cli.interrupted told WORD ...
"""

import ctypes
import signal
import sys
from functools import partial
from typing import NoReturn

from isoloss.engine.run.preemption import Preemption
from isoloss.recipes import launch


def hang(moment: str, *_) -> None:
    if moment == "training":  # as `Preemption` does
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda *_: None)
    stop("ready\n")


def stop(text: str) -> NoReturn:
    mutex = ctypes.create_string_buffer(256)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print(text, end="", flush=True)
    lock(mutex)
    raise AssertionError("the lock was free")


def hang_once_told() -> None:
    received = Preemption.received

    def look(self: Preemption) -> signal.Signals | None:
        return stop("") if (found := received(self)) else found

    Preemption.received = look


if __name__ == "__main__":
    moment, *words = sys.argv[1:]
    if moment == "told":
        hang_once_told()
        sys.exit(launch.main("sft", words))
    launch.run = partial(hang, moment)
    sys.exit(launch.main("sft", ["model.path=m", "data.train=[rows.jsonl]"]))
