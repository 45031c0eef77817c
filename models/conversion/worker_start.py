"""The script that a worker of `transfer` starts as, run by its path: python worker_start.py CONNECTION

Importing `isoloss.models` brings torch and Megatron-Core with it: hundreds of megabytes and seconds for each worker. So
modules of that package are imported here without the package's own code, and what they need beyond the standard library
they import when they use it.
"""

import contextlib
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

PACKAGE = "isoloss.models.conversion"


def main() -> None:
    for name in ("isoloss", "isoloss.models", PACKAGE):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(Path(__file__).parent)] if name == PACKAGE else []
    from isoloss.models.conversion import worker

    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent may be gone
        sys.path[:] = connection.recv()
        worker.serve(connection)


if __name__ == "__main__":
    main()
