"""A small disk, which can be filled, where this machine lets us mount one."""

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 64) -> Iterator[bool]:
    """A disk of its own for what is in `folder`. Gives False, and mounts nothing, where that is not allowed."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Until the end of the block nothing fits on the disk of `folder`, whatever is deleted meanwhile."""
    ballast, over = folder / "ballast", threading.Event()

    def fill() -> None:
        while True:
            disk = os.statvfs(folder)
            with contextlib.suppress(OSError), ballast.open("ab") as opened:  # somebody else may be faster to fill it
                opened.write(bytes(disk.f_bavail * disk.f_frsize))
            if over.wait(0.02):
                break

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        ballast.unlink()
