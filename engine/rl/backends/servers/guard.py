"""Runs a command and, when it ends, kills what it left behind.

    python guard.py [--hide VARIABLE] COMMAND...

It leads the process group that ends with its owner (`isoloss.parallel.processes`). A command may close every descriptor
that it was given, as ssh does, and its children may outlive it: the guard keeps the lifeline open until all are gone.
With --hide, the value of that environment variable is taken out of what the command prints.
It imports nothing of isoloss: a guard is small.
"""

import os
import signal
import subprocess
import sys
import threading
from typing import IO

LAST_LINES_SECONDS = 1.0  # what the command left behind may keep its output open


def main() -> None:
    if sys.argv[1] == "--hide":
        status = call_without(os.environb[sys.argv[2].encode()], sys.argv[3:])
    else:
        status = subprocess.call(sys.argv[1:])
    print(f"the command ended with status {status}", flush=True)
    os.killpg(0, signal.SIGKILL)  # what it left behind, and this process


def call_without(secret: bytes, command: list[str]) -> int:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    copying = threading.Thread(target=copy_without, args=(secret, process.stdout), daemon=True)
    copying.start()
    status = process.wait()
    copying.join(LAST_LINES_SECONDS)
    return status


def copy_without(secret: bytes, lines: IO[bytes]) -> None:
    for line in lines:
        sys.stdout.buffer.write(line.replace(secret, b"***"))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
