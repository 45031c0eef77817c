"""Runs a command and kills it, with all its descendants, when the process that asked for it ends in whatever way.

    python guard.py PID COMMAND...     PID: of the process that asks, our parent

It runs by its path, as the leader of a process group of its own, and imports nothing of isoloss: a guard is small.
"""

import os
import signal
import subprocess
import sys
import time

LOOK_SECONDS = 0.2


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    child = subprocess.Popen(command)
    # Not PR_SET_PDEATHSIG: that fires when the thread that started us ends, and spares grandchildren.
    while child.poll() is None and os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    print(f"the command ended with status {child.poll()}", flush=True)
    os.killpg(0, signal.SIGKILL)  # what it left behind, and this process


if __name__ == "__main__":
    main()
