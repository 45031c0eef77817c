"""A process that has imported the modules that its arguments name, and runs pytest in forks of itself: half of what a
test of a mutant takes is imports of torch and transformers.

Reads one line a run, JSON: pytest's arguments, the file for its output, and how many seconds it may take. Answers with
pytest's status, negative where a signal ended it, `null` where the time was up.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time


def run(arguments: list[str], output: str, seconds: float) -> int | None:
    """In a session of its own, of which nothing is left afterwards."""
    child = os.fork()
    if child == 0:
        os.setsid()
        for descriptor in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["pytest", *arguments]
        import pytest

        status = pytest.main(arguments)
        sys.stdout.flush()
        os._exit(status)
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def serve(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
