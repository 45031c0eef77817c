"""Run work that writes files with a fault at its k-th operation on the disk: killed, or refused by the system."""

import builtins
import contextlib
import errno
import io
import math
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from isoloss.engine.instruments import files

OPERATIONS = ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir", "sendfile")
DISK_FULL, DISK_BROKEN = errno.ENOSPC, errno.EIO
SLOW = 0.03


class Dead(BaseException):
    """Stands for the end of the process: nothing handles it."""


class Operations:
    """Counts the operations of this process and of one forked from it, whatever thread does them; those of files that
    Python's `open` opens for writing as well.

    at: the one that the fault strikes, from 0.
    fault: "kill" (the whole process group; a write is left half done), "dead" (as much on the disk as after a kill, in
        a process that lives: from there on every operation raises Dead), "slow" (from there on every operation takes
        SLOW seconds longer), or the number of an OSError.
    """

    def __init__(self, at: int | None, fault: str | int):
        self.at, self.fault = at, fault
        self._count = multiprocessing.get_context("fork").Value("i", 0)
        self._real: dict[str, Any] = {name: getattr(os, name) for name in OPERATIONS}

    def __enter__(self) -> "Operations":
        for name in OPERATIONS:
            setattr(os, name, lambda *args, _name=name, **options: self._operate(_name, args, options))
        self._open = builtins.open
        builtins.open = io.open = self._opened
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._real.items():
            setattr(os, name, function)
        builtins.open = io.open = self._open

    @property
    def count(self) -> int:
        return self._count.get_obj().value  # a process that was killed may have held the lock

    def _opened(self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        """As `open`, but every block that such a file is given is an operation."""
        if not set(mode) & set("wax+") or isinstance(file, int) or os.path.basename(file) == "null":
            return self._open(file, mode, buffering, *args, **options)
        raw = _Counted(file, mode.replace("b", "").replace("t", ""), opener=os.open)
        raw.operate = self._operate
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **options)

    def _operate(self, name: str, args: tuple, options: dict, real: Callable | None = None) -> Any:
        real = real or self._real[name]
        with self._count.get_lock():
            now = self._count.value
            self._count.value += 1
        if now == self.at:
            if isinstance(self.fault, int):
                raise OSError(self.fault, os.strerror(self.fault))
            if name == "write":
                with contextlib.suppress(OSError):  # half a block, past the page cache
                    real(*args[:-1], bytes(args[-1])[: len(args[-1]) // 2])
            if self.fault == "kill":
                os.killpg(0, signal.SIGKILL)
        if self.fault == "slow" and self.at is not None and now >= self.at:
            time.sleep(SLOW)
        if self.fault == "dead" and self.at is not None and now >= self.at:
            raise Dead
        return real(*args, **options)


class _Counted(io.FileIO):
    operate: Callable

    def write(self, block: Any) -> int:
        return self.operate("write", (block,), {}, super().write)


def struck(
    work: Callable[[], object], at: int | None, fault: str | int = "kill", before: Callable[[], object] = lambda: None
) -> tuple[str, int]:
    """Do `work` in a process group of its own, after `before`, whose operations do not count. Returns how it ended
    ("done", "killed", or the text of its exception) and the number of operations."""
    operations = Operations(at, fault)
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        text = "done"
        try:
            os.setpgid(0, 0)
            before()
            with operations:
                work()
        except Exception as error:
            text = str(error) if isinstance(error, ValueError) else traceback.format_exc()
        finally:
            os.write(there, text.encode())
            os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as pipe:
        text = pipe.read().decode()
    status = os.waitpid(pid, 0)[1]
    return ("killed" if os.WIFSIGNALED(status) else text), operations.count


class FullDisk:
    """Of the files that runs append to: `room` bytes are left of it."""

    room: float = math.inf

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        disk = self

        class File(io.FileIO):
            def write(self, block: Any) -> int:
                if disk.room <= 0:
                    raise OSError(DISK_FULL, os.strerror(DISK_FULL))
                written = super().write(bytes(block)[: min(len(block), disk.room)])
                disk.room -= written
                return written

        monkeypatch.setattr(files, "FileIO", File)
