"""A process that has imported the modules that its arguments name, and runs pytest in forks of itself: most of what a
test of a mutant takes is imports of torch, transformers and Megatron-Core.

First it writes one line, JSON: the files of the repository that are among what it has imported. A mutant of one of
these needs another process, which has not. Then it reads one line a run, JSON: the arguments of `run`. It answers with
pytest's status, negative where a signal ended it, `null` where the time was up.

The fork server from which a pool starts its ranks is a fork of this process too. It is made before pytest runs, so it
has nothing of the tests, as the one that Python starts has not.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from multiprocessing import forkserver, util
from pathlib import Path

import pytest

FORK_SERVER = "from multiprocessing.forkserver import main"  # how the command of one begins


class Recorder:
    """Runs chosen rows in a given order, and writes what became of each: a line of JSON that names it when it begins,
    and one when it ends with its outcome, its CPU seconds (wall seconds where nobody measures the others), and its wall
    seconds.

    rows: the rows to run, in this order, with the seconds that each may take; None for all, in pytest's order. again:
    run those once more at the end that are the first to use a fixture of their file or session, for the first pays for
    what the others share. reached: a folder whose files are listed, and deleted, after each row.
    """

    def __init__(self, path: str, rows: dict[str, float] | None, again: bool, reached: str | None) -> None:
        self._path, self._rows, self._again, self._reached = path, rows, again, reached
        self._seconds, self._wall, self._outcome = 0.0, 0.0, "passed"

    def _write(self, **line: object) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")

    @pytest.hookimpl(trylast=True)  # after what leaves out and sorts
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._rows is not None:
            places = {row: place for place, row in enumerate(self._rows)}
            items[:] = sorted((item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid])
            for item in items:
                if item.get_closest_marker("timeout") is None:
                    item.add_marker(pytest.mark.timeout(self._rows[item.nodeid]))
        self._write(collected=[item.nodeid for item in items])
        if self._again and len(items) > 1:
            used: set[object] = set()
            first: list[pytest.Item] = []
            for item in items:
                known = getattr(item, "_fixtureinfo", None)
                shared = {
                    definition
                    for definitions in (known.name2fixturedefs.values() if known else ())
                    for definition in definitions
                    if definition.scope != "function" and definition.baseid  # none: pytest's own
                }
                if shared - used:
                    first.append(item)
                used |= shared
            items += first

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._seconds, self._wall, self._outcome = 0.0, 0.0, "passed"
        self._write(begins=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += getattr(report, "cpu", report.duration)
        self._wall += report.duration
        if report.failed:
            self._outcome = "failed"
        if report.when == "teardown":
            seconds = [round(self._seconds, 3), round(self._wall, 3)]
            found = os.listdir(self._reached) if self._reached else []
            for name in found:
                os.unlink(os.path.join(self._reached, name))
            self._write(row=report.nodeid, outcome=self._outcome, seconds=seconds, reached=found)


def fork_server_in_waiting() -> None:
    """A fork of this process, which becomes the fork server that is started first from here on."""
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        here.close()
        message, descriptors, _, _ = socket.recv_fds(there, 2**20, 16)
        if not message:
            os._exit(0)
        there.close()
        told = json.loads(message)
        # First out of the way of the numbers that they shall have.
        moved = [os.dup2(given, 200 + place, inheritable=False) for place, given in enumerate(descriptors)]
        for given in descriptors:
            os.close(given)
        for descriptor, wanted in zip(moved, told["descriptors"]):
            os.dup2(descriptor, wanted)
            os.close(descriptor)
        os.chdir(told["folder"])
        os.environ.clear()
        os.environ.update(told["environment"])
        sys.argv = ["-c"]
        status = 1
        try:
            exec(told["command"], {})
            status = 0
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else 0
        finally:
            os._exit(status)
    there.close()
    spawn = util.spawnv_passfds

    def spawn_or_wake(path, args, passed):
        if not str(args[-1]).startswith(FORK_SERVER):
            return spawn(path, args, passed)
        util.spawnv_passfds = spawn
        descriptors = [0, 1, 2, *passed]
        told = {
            "command": args[-1],
            "descriptors": descriptors,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
        }
        socket.send_fds(here, [json.dumps(told).encode()], descriptors)
        here.close()
        return pid

    util.spawnv_passfds = spawn_or_wake


def run(
    arguments: list[str],
    output: str,
    seconds: float,
    record: str,
    rows: dict[str, float] | None = None,
    again: bool = False,
    reached: str | None = None,
) -> int | None:
    """In a session of its own, of which nothing is left afterwards. record: the file that `Recorder` writes."""
    child = os.fork()
    if child == 0:
        os.setsid()
        for descriptor in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        fork_server_in_waiting()
        sys.argv = ["pytest", *arguments]
        status = pytest.main(arguments, [Recorder(record, rows, again, reached)])
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


def imported(folder: Path) -> list[str]:
    """The files of `folder` that are imported, but for this one."""
    files = {getattr(module, "__file__", None) for name, module in sys.modules.items() if name != "__main__"}
    paths = {Path(file).resolve() for file in files if file}
    return sorted(str(path.relative_to(folder)) for path in paths if path.is_relative_to(folder))


def serve(modules: list[str]) -> None:
    assert forkserver._forkserver._forkserver_pid is None
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a fork would look at all of it, and copy it
    print(json.dumps(imported(Path.cwd())), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
