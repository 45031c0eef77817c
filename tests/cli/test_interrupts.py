"""Ctrl-C, of a process and as torchrun passes it on. That a run saves is in tests/checkpoints/test_resume.py."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.runs import warm
from support.runs.waiting import LONG

from isoloss.engine.run.preemption import Preemption
from isoloss.recipes import interrupts

TESTS = Path(__file__).parents[1]
SAVING = "isoloss: interrupted: finishing the step under way and saving"
LOST = "isoloss: interrupted twice: the steps since the newest checkpoint are lost"


@pytest.fixture
def hanging() -> Iterator[Callable[..., warm.Popen]]:
    """hanging(moment, **environment) -> a run that hangs at that moment."""
    started = []

    def start(moment: str, **environment: str) -> warm.Popen:
        process = warm.Popen(
            [sys.executable, "-m", "cli.interrupted", moment],
            env=os.environ | environment | {"PYTHONPATH": str(TESTS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(process: warm.Popen) -> tuple[int, list[str]]:
    said = process.communicate(timeout=LONG)[1]
    return process.returncode, said.splitlines()


def test_before_training_it_ends_at_once_in_one_line(hanging):
    process = hanging("loading")
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, ["isoloss: interrupted"])


def test_the_second_one_ends_a_run_that_hangs(hanging):
    process = hanging("training")
    process.send_signal(signal.SIGINT)
    first = process.stderr.readline()
    assert first.startswith(f"{SAVING}; Ctrl-C again ends at once")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, [LOST])


def test_torchrun_passes_the_second_one_on_as_sigterm(hanging):
    """And the first line tells how long torchrun waits."""
    process = hanging("training", TORCHELASTIC_RUN_ID="none", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="77")
    process.send_signal(signal.SIGINT)
    first = process.stderr.readline()
    assert first.startswith(SAVING) and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=77" in first
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (130, [LOST])


def test_one_rank_of_a_node_tells_of_it(monkeypatch, capfd):
    for local_rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        interrupts._report("interrupted")
    assert capfd.readouterr() == ("", "isoloss: interrupted\n")


def test_sigterm_without_ctrl_c_is_left_to_the_run(monkeypatch, capfd):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(bytes([signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM]))
        theirs.shutdown(socket.SHUT_WR)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        interrupts._watch(ours)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("number", "seconds", "torchrun", "again"),
    [
        (signal.SIGINT, 0.1, False, True),
        (signal.SIGINT, 0.1, True, False),  # the agent passes on what the launcher sent to every process
        (signal.SIGINT, 1.1, True, True),
        (signal.SIGTERM, 0.1, True, True),
        (signal.SIGTERM, 9.0, False, False),  # a cluster, which leaves time to save
        (signal.SIGUSR1, 9.0, True, False),
    ],
)
def test_what_is_another_ctrl_c(number, seconds, torchrun, again):
    assert interrupts._again(number, seconds, torchrun) == again


def test_where_sigint_is_ignored_it_stays_so():
    """As in the background of a script, whose own Ctrl-C is not meant for this run."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    preemption = Preemption(None)  # pyright: ignore[reportArgumentType]
    try:
        with interrupts.watched():
            preemption.begin()
            signal.raise_signal(signal.SIGINT)
            assert not preemption._received
            preemption.end()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_program_of_ones_own_gets_the_second_one():
    """Without the recipes' thread: the first saves, the second is Python's, and afterwards the first is again."""
    preemption = Preemption(None)  # pyright: ignore[reportArgumentType]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had these tests ignore it
    try:
        preemption.begin()
        signal.raise_signal(signal.SIGINT)
        assert preemption._received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        preemption.end()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_while_python_ends_ctrl_c_gives_no_traceback():
    """Imports take seconds to undo."""
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell's jobs may ignore it
    leaves = f"{heard}\nfrom isoloss.recipes import interrupts\nwith interrupts.watched(last=True): pass\n"
    command = [sys.executable, "-c", f"{leaves}signal.raise_signal(signal.SIGINT)"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
