"""A process that starts every kind of helper that there is, busy ones and idle ones, and is to be killed."""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from isoloss.engine.rl.backends.servers.process import ServerProcess
from isoloss.engine.rl.reward.pool import Call, RewardPool
from isoloss.models.conversion import transfer
from isoloss.models.conversion.plan import FilePlan, OutputFile
from isoloss.tools.prove.rank_pool import WorkerPool
from support.models.transformers_parity import make_engine
from support.runs.waiting import until

# A function that starts a process and never lets Python run again.
REWARD = """
import re, subprocess, sys
def never(completion):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    re.match(r"(a+)+$", "a" * 60 + "b")
"""
SERVER = "bash -c 'sleep 1001 & sleep 1002'"


class Never:
    """A part of a file that a conversion waits for, as for a disk that hangs."""

    nbytes, paths = 1, ()

    def blocks(self) -> Iterator[bytes]:
        time.sleep(1000)
        yield b"1"


def in_background(function: Callable[..., object], *args: object) -> None:
    threading.Thread(target=function, args=args, daemon=True).start()


def main(folder: Path) -> None:
    """Writes folder/started.json, {kind: process ids}, once all are there. folder: has a folder `model` in it."""
    mine, started = psutil.Process(), {}

    @contextlib.contextmanager
    def counted(kind: str, count: int) -> Iterator[None]:
        before = set(mine.children(recursive=True))
        yield
        enough = lambda: len(mine.children(recursive=True)) >= len(before) + count
        until(enough, f"there were {count} processes of {kind}")
        found = set(mine.children(recursive=True)) - before
        started[kind] = [process.pid for process in found]

    with counted("pool of ranks", 3):  # a worker, the fork server, multiprocessing's tracker
        pool = WorkerPool(1)
        in_background(pool.run, 1, time.sleep, 1000)
    with counted("reward functions", 3):
        (folder / "reward.py").write_text(REWARD)
        rewards = RewardPool([f"{folder}/reward.py:never"], 2, 1000.0)
        in_background(rewards.run, [Call(0, {"completion": ""})])
    with counted("conversion", 0):
        plan = FilePlan((OutputFile("file", (Never(),)),) * 2, (), ("manifest", str))
        in_background(transfer.run, plan, folder / "converted")
        until((folder / ".converted.partial" / "files" / "file").exists, "a thread had begun to write")
    with counted("server", 4):  # the guard, the command, and what that started
        server = ServerProcess(SERVER, "http://127.0.0.1:5", folder, folder)
        server.start()
    with counted("checkpoint", 0):
        make_engine(folder / "model", "fp32").save(folder / "checkpoint")
    (folder / "partial").write_text(json.dumps(started))
    os.rename(folder / "partial", folder / "started.json")
    time.sleep(1000)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
