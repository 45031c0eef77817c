"""Runs in a terminal that receive a signal to end while they show the live view: the screen, the status, and what was
saved."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from support.runs import warm
from support.runs.runs import typed
from support.runs.terminal import Session
from support.runs.waiting import until

TESTS = Path(__file__).parents[1]
COLUMNS = 250  # a path of a test is one line
BAR = r"^step (\d+)/100000  ━+"
SAVING = "isoloss: interrupted: finishing the step under way and saving"
PATHS = {"PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.fixture
def words(arguments) -> list[str]:
    out = f"output_dir={Path.cwd()}/out"
    return typed(*arguments, "train.steps=100000", "checkpoint.every=5", "checkpoint.keep=2", out)


def saved() -> list[str]:
    """The folders of checkpoints, the newest last."""
    folders = Path("out/checkpoints").glob("step_*")
    assert all((folder / "isoloss.json").is_file() for folder in folders)
    return sorted(folder.name for folder in Path("out/checkpoints").glob("step_*"))


def last_view(lines: list[str]) -> tuple[int, list[str]]:
    """The step of the last live view, and the lines below it. Raises AssertionError unless it is whole."""
    place = max(number for number, line in enumerate(lines) if re.search(BAR, line))
    bar, numbers, curve, *below = lines[place:]
    assert re.search(r" ETA [\d:]+$", bar) and re.match(r"loss \d.*s/step$", numbers)
    assert re.match("loss [▁▂▃▄▅▆▇█]+ .* to ", curve)
    (step,) = re.findall(BAR, bar)
    return int(step), below


def test_ctrl_c_saves_and_says_so_below_the_last_view(words):
    with Session(["isoloss.recipes.sft", *words], COLUMNS, warm.Popen, **PATHS) as run:
        run.shows(BAR)
        run.type("\x03")
        status, lines = run.ended()
    step, below = last_view(lines)
    assert status == 130 and saved()[-1] == f"step_{step:08}"
    folder = f"{Path.cwd()}/out/checkpoints/step_{step:08}"
    assert below == [f"told to end by SIGINT: saved {folder}; go on with checkpoint.resume=true", ""]
    text = "\n".join(lines[: -len(below)])
    assert len(re.findall(BAR, text, re.M)) == 1 and text.count(f"{SAVING}; Ctrl-C again") == 1 and "^C" not in text


def test_sigterm_saves_and_says_so_below_the_last_view(words):
    with Session(["isoloss.recipes.sft", *words], COLUMNS, warm.Popen, **PATHS) as run:
        run.shows(BAR)
        os.kill(run.process.pid, signal.SIGTERM)
        status, lines = run.ended()
    step, below = last_view(lines)
    assert status == 75 and saved()[-1] == f"step_{step:08}"
    assert [line.partition(":")[0] for line in below] == ["told to end by SIGTERM", ""]
    assert sum(bool(re.search(BAR, line)) for line in lines) == 1


def test_a_second_ctrl_c_ends_at_once_and_leaves_the_view_and_the_checkpoints(words):
    with Session(["cli.interrupted", "told", *words], COLUMNS, warm.Popen, **PATHS) as run:
        until(lambda: run.shows(BAR) and saved(), "a checkpoint was there")
        run.type("\x03")
        run.shows(SAVING)
        run.type("\x03")
        status, lines = run.ended()
    step, below = last_view(lines)
    assert status == 130
    assert below == ["^C", "isoloss: interrupted twice: the steps since the newest checkpoint are lost", ""]
    assert saved() and int(saved()[-1].removeprefix("step_")) <= step + 1
    assert sum(bool(re.search(BAR, line)) for line in lines) == 1


@pytest.mark.full
def test_two_ranks_under_torchrun(words):
    """Its agent prints below the view, which is not drawn over that; the last one is followed by what was saved."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "isoloss.recipes.sft"]
    with Session([*torchrun, *words], COLUMNS, subprocess.Popen, **PATHS, OMP_NUM_THREADS="1") as run:
        run.shows(BAR)
        run.type("\x03")
        status, lines = run.ended()
    step, (told, *below) = last_view(lines)
    assert status == 1 and saved()[-1] == f"step_{step:08}"
    assert told.startswith("told to end by SIGINT: saved") and "SignalException" in below[-2]  # torchrun's traceback
    text = "\n".join(lines)
    assert text.count("Sending process") == 2 and "Received 2 death signal" in text, "nothing was drawn over them"
    assert text.count(SAVING) == 1
