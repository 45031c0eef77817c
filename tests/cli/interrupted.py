"""A run of the sft recipe that says "ready" and then hangs in C, where Python runs no handler of a signal:

python -m cli.interrupted loading|training
"""

import ctypes
import signal
import sys
from functools import partial

from isoloss.recipes import launch


def hang(moment: str, *_) -> None:
    if moment == "training":  # as `Preemption` does
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda *_: None)
    mutex = ctypes.create_string_buffer(256)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print("ready", flush=True)
    lock(mutex)


if __name__ == "__main__":
    launch.run = partial(hang, sys.argv[1])
    sys.exit(launch.main("sft", ["model.path=m", "data.train=[rows.jsonl]"]))
