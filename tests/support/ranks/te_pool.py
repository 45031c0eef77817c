"""A pool of ranks for which Transformer Engine imports: its stand-in in tests/doubles.

It has to be importable before Megatron-Core is imported, and the ranks of a `WorkerPool` are forked from one process
that has done so already. So this pool lives behind a process of its own.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
PATHS = (TESTS, TESTS / "doubles", TESTS / "oracles" / "mbridge")


def environment() -> dict[str, str]:
    """Variables of a process that imports the stand-in, and what is in tests/support."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")])}


class TransformerEnginePool:
    """`run` as that of `isoloss.tools.prove.rank_pool.WorkerPool`; a failure raises RuntimeError. Use as a context
    manager."""

    def __init__(self, size: int):
        self.size = size

    def __enter__(self) -> "TransformerEnginePool":
        self._connection, there = Pipe()
        command = [sys.executable, "-m", "support.ranks.te_pool", str(there.fileno()), str(self.size)]
        self._process = subprocess.Popen(command, env=environment(), pass_fds=[there.fileno()])
        there.close()
        return self

    def __exit__(self, *exc) -> None:
        self._connection.close()
        self._process.wait()

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        # Plain pickles: those of a Connection share the memory of tensors, which takes a common ancestor.
        self._connection.send_bytes(pickle.dumps((world, function, args)))
        succeeded, answer = pickle.loads(self._connection.recv_bytes())
        if not succeeded:
            raise RuntimeError(answer)
        return answer


def _serve(connection: Connection, size: int) -> None:
    from isoloss.parallel import UserError
    from isoloss.tools.prove.rank_pool import WorkerError, WorkerPool
    from support.suite import covered

    covered.measure_ranks()
    with connection, WorkerPool(size) as pool:
        while True:
            try:
                world, function, args = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            try:
                answer = True, pool.run(world, function, *args)
            except (UserError, WorkerError) as error:
                answer = False, str(error)
            connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
