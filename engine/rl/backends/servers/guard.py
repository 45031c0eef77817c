"""Runs a command and, when it ends, kills what it left behind.

    python guard.py COMMAND...

It leads the process group that ends with its owner (`isoloss.parallel.processes`). A command may close every descriptor
that it was given, as ssh does, and its children may outlive it: the guard keeps the lifeline open until all are gone.
It imports nothing of isoloss: a guard is small.
"""

import os
import signal
import subprocess
import sys


def main() -> None:
    status = subprocess.call(sys.argv[1:])
    print(f"the command ended with status {status}", flush=True)
    os.killpg(0, signal.SIGKILL)  # what it left behind, and this process


if __name__ == "__main__":
    main()
