"""Nothing that a run started outlives it, or holds its output open, however it ends."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.models.families import write_folder
from support.runs.waiting import LONG, until

from isoloss.parallel.runtime import processes


def command_line(process: psutil.Process) -> str:
    """Empty for one that has ended, whether or not somebody has asked for its status yet."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # or a zombie
        return ""


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Iterator[tuple[dict[str, int], dict[str, list[str]], bool]]:
    """A process that started every kind of helper and got SIGKILL: how many there were of each kind, which of them were
    left after a LONG while, and whether its standard output and standard error had come to their end."""
    folder = tmp_path_factory.mktemp("owner")
    write_folder("qwen3", folder / "model")
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "support.ranks.owner", str(folder)]
    owner = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    started: dict[str, list[psutil.Process]] = {}
    try:
        try:
            until((folder / "started.json").exists, "all kinds were there", lambda: owner.poll() is None)
        except AssertionError as error:
            owner.kill()
            raise AssertionError(f"{error}\n{owner.communicate(timeout=LONG)[0].decode()}") from None
        pids = json.loads((folder / "started.json").read_text())
        started = {kind: [psutil.Process(pid) for pid in pids[kind]] for kind in pids}
        os.kill(owner.pid, signal.SIGKILL)
        _, remaining = psutil.wait_procs([each for of_kind in started.values() for each in of_kind], LONG)
        left = {}
        for kind, processes in started.items():
            alive = [each for each in processes if each in remaining]
            left[kind] = [line for process in alive if (line := command_line(process))]
        try:
            owner.communicate(timeout=1 if remaining else LONG)
            ended = True
        except subprocess.TimeoutExpired:
            ended = False
        yield {kind: len(pids[kind]) for kind in pids}, left, ended
    finally:
        owner.kill()
        for process in itertools.chain.from_iterable(started.values()):
            if process.is_running():
                process.kill()


@pytest.mark.parametrize("kind", ["pool of ranks", "reward functions", "conversion", "server", "checkpoint"])
def test_helpers_end_with_an_owner_that_is_killed(killed, kind):
    _, left, _ = killed
    assert left[kind] == []


def test_the_owners_output_ends_with_it(killed):
    _, _, ended = killed
    assert ended


def test_neither_a_checkpoint_nor_a_conversion_takes_a_process(killed):
    started, _, _ = killed
    assert started == {"pool of ranks": 3, "reward functions": 3, "conversion": 0, "server": 4, "checkpoint": 0}


# A process without isoloss, whose imports take seconds. Its helper knows nothing of lifelines, and starts another.
OWNER = """
import runpy, sys, time
helper = runpy.run_path(sys.argv[1])["Helper"](["bash", "-c", "sleep 1005 & sleep 1006"])
time.sleep(1000)
"""


def test_what_a_helper_started_ends_with_the_owner_of_the_helper():
    with subprocess.Popen([sys.executable, "-c", OWNER, processes.__file__]) as owner:
        try:
            family = until(lambda: three_of(owner.pid), "the helper had started another")
        finally:
            owner.kill()
    _, alive = psutil.wait_procs(family, 20)  # of 1000 seconds that they would take
    for process in alive:
        process.kill()
    assert alive == []


def three_of(pid: int) -> list[psutil.Process]:
    """The helper and its two commands, once they are there."""
    family = psutil.Process(pid).children(recursive=True)
    return family if sum(command_line(each).startswith("sleep") for each in family) == 2 else []


CHILD = (
    "import time; from isoloss.parallel.runtime import processes; processes.end_with_parent(); print('up', flush=True)"
)
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], start_new_session=True)"


def test_a_rank_in_a_session_of_its_own_ends_with_its_launcher():
    child = f"{CHILD}; time.sleep(600)"
    launcher = subprocess.Popen([sys.executable, "-c", PARENT, child], stdout=subprocess.PIPE)
    assert launcher.stdout is not None and launcher.stdout.readline() == b"up\n"
    (rank,) = psutil.Process(launcher.pid).children()
    launcher.kill()
    launcher.wait()
    until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, "the rank ends")
