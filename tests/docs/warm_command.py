"""`python` and `torchrun` of a page's blocks: modules and files start as forks of an interpreter that has imported all.

    python -S warm_command.py DESCRIPTOR [-m MODULE | FILE | OPTION] ...

DESCRIPTOR: of a connection to `support.runs.warm`. Other options than -m have an interpreter of their own.
"""

import os
import socket
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    from support.runs import warm

    descriptor, *command = sys.argv[1:]
    if command[0] != "-m" and command[0].startswith("-"):
        os.execv(sys.executable, [sys.executable, *command])
    sys.exit(warm.Popen([sys.executable, *command], server=socket.socket(fileno=int(descriptor))).wait())
