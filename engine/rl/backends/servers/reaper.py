"""Runs a command and, when it ends, kills what it left behind.

    python reaper.py [--hide VARIABLE] COMMAND...

It leads the process group that ends with its owner (`isoloss.parallel.runtime.processes`). A command may close every
descriptor that it was given, as ssh does, and its children may outlive it: the guard keeps the lifeline open until all
are gone. What the command prints goes through the guard, so that a full disk does not stop it; with --hide, without the
value of that environment variable. It imports nothing of isoloss: a guard is small.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from typing import IO

LAST_LINES_SECONDS = 1.0  # what the command left behind may keep its output open


def main() -> None:
    if sys.argv[1] == "--hide":
        status = call(sys.argv[3:], os.environb[sys.argv[2].encode()])
    else:
        status = call(sys.argv[1:], b"")
    log(f"the command ended with status {status}\n".encode())
    os.killpg(0, signal.SIGKILL)  # what it left behind, and this process


def call(command: list[str], secret: bytes) -> int:
    log(without(secret, f"$ {shlex.join(command)}\n".encode()))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    copying = threading.Thread(target=copy, args=(process.stdout, secret), daemon=True)
    copying.start()
    status = process.wait()
    copying.join(LAST_LINES_SECONDS)
    return status


def copy(printed: IO[bytes], secret: bytes) -> None:
    """Whole lines where there is a secret, which could lie on both sides of a cut."""
    for piece in printed if secret else iter(lambda: os.read(printed.fileno(), 65536), b""):
        log(without(secret, piece))


def without(secret: bytes, text: bytes) -> bytes:
    return text.replace(secret, b"***") if secret else text


def log(text: bytes) -> None:
    """Write to the log; a text that a full disk does not take is lost."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), text)


if __name__ == "__main__":
    main()
