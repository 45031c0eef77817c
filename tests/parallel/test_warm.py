"""Commands that start as forks of a warm interpreter are those that `python -m` would run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks.te_pool import TESTS
from support.runs import warm

PROGRAM = """
import atexit, json, os, random, sys, tempfile, threading
import numpy
atexit.register(print, "left")
print(json.dumps({
    "argv": sys.argv, "name": __name__, "main": sys.modules["__main__"].__dict__ is globals(), "path": sys.path,
    "environment": dict(os.environ), "folder": os.getcwd(), "read": sys.stdin.read(),
    "session": os.getsid(0) == os.getpid(), "temporary": tempfile.gettempdir(), "threads": threading.active_count(),
    "descriptors": sorted(os.listdir("/proc/self/fd")), "chance": [random.random(), numpy.random.rand()],
}))
print("told", file=sys.stderr)
sys.exit(7)
"""


def started(start, folder: Path, **options) -> tuple[int, dict, str, str]:
    (folder / "program.py").write_text(PROGRAM)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{TESTS}{os.pathsep}{folder}",
        "TMPDIR": str(folder),
        "LC_ALL": "C.UTF-8",
    }
    command = [sys.executable, "-m", "program", "a b", "--c"]
    with start(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=environment,
        text=True,
        **options,
    ) as process:
        out, err = process.communicate("given")
    told, *rest = out.splitlines()
    return process.returncode, json.loads(told), "".join(rest), err


@pytest.mark.parametrize("session", [False, True])
def test_a_warm_command_is_a_cold_one(session, tmp_path):
    starts = (subprocess.Popen, warm.Popen, warm.Popen)
    cold, *others = [started(start, tmp_path, start_new_session=session) for start in starts]
    chances = [found[1].pop("chance") for found in (cold, *others)]
    assert others == [cold, cold]
    assert len({number for chance in chances for number in chance}) == 6


def test_a_warm_command_has_a_time_and_ends_by_its_signal(tmp_path):
    (tmp_path / "sleeper.py").write_text("import time; print('here', flush=True); time.sleep(1000)")
    command = [sys.executable, "-m", "sleeper"]
    with warm.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"here\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        assert process.poll() is None
        process.terminate()
        assert process.wait() == -signal.SIGTERM
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run(command, cwd=tmp_path, capture_output=True, timeout=0.1)  # which waits for it to end
