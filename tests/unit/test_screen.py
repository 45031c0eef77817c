"""What a terminal shows of a run, byte by byte, at three widths; trends and curves."""

import math
import os
import re
import subprocess
import sys

import pytest
from support.runs.terminal import terminal

from isoloss.engine.run.screen import FIELDS, MORE_FIELDS, Screen, curve, fields, headline, summary, trend
from isoloss.parallel.runtime import console
from isoloss.parallel.runtime.console import Progress, Wait, say

SFT = {"loss": 12.3456, "grad_norm": 1.25, "lr": 3e-4, "tokens_per_second": 1234567.0, "mfu": 0.345, "seconds": 1.25}
RL = {
    "loss": 1e-9, "reward_mean": 0.3125, "groups_drawn": 1600, "groups_without_variance": 301, "pass@1": 0.25,
    "truncated_fraction": 0.125, "response_length_mean": 12345.0, "kl": 0.00123, "entropy": 1.5, **SFT,
}  # fmt: skip
NUMBERS = {
    "sft": ["loss 12.3456", "1,234,567 tokens/s", "MFU 34.5%", "grad norm 1.25", "lr 3.00e-04", "1.2 s/step"],
    "rl": ["reward 0.312", "pass@1 0.250", "no variance 301/1600", "truncated 12%", "length 12,345", "KL 0.0012",
           "1,234,567 tokens/s", "entropy 1.500"],
}  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("columns", [60, 100, 200])
@pytest.mark.parametrize(("kind", "row"), [("sft", SFT), ("rl", RL)])
def test_no_number_is_cut(monkeypatch, clock, columns, kind, row):
    with terminal(monkeypatch, columns) as screen:
        view = Screen(0, 100_000)
        for step in range(1, 6):
            clock[0] += 1
            view.show(99_000 + step, row, 86_400.0)
            screen.read()  # a pseudo-terminal holds 4 KiB
        lines = screen.read()
        assert all(len(line) < columns for line in lines)
        assert lines[0].startswith("step 99005/100000  ") and re.search(r"24:00:00  ETA 0:14:28$", lines[0])
        text = "\n".join(lines)
        assert [number for number in NUMBERS[kind] if number not in text] == []
        assert ("━" * 10 in lines[0]) and lines[-2].startswith(("loss ▁", "reward ▁")[kind == "rl"])
        assert len(lines) <= 5 + 1 and lines[-1] == "" and (screen.row, screen.column) == (len(lines) - 1, 0)


@pytest.mark.parametrize("columns", [24, 40, 50, 60, 80])
def test_numbers_that_have_no_room_are_left_out_from_the_end(monkeypatch, clock, columns):
    """Whole ones; those that matter most stay."""
    with terminal(monkeypatch, columns) as screen:
        view = Screen(0, 100)
        for step in (1, 2):
            clock[0] += 1
            view.show(step, RL, 1.0)
        lines = screen.read()[:-1]
        shown = [part for line in lines for part in re.split(" {2,}", line)]
        every = [*headline(RL), *fields(RL, FIELDS), *fields(RL, MORE_FIELDS)]
        kept = [number for number in every if number in shown]
        rows = [line for line in lines if any(number in line for number in kept)]
        assert len(rows) <= 3 and all(len(line) < columns for line in lines)
        assert kept[0] == every[0] and (columns < 60 or kept == every[: len(kept)])
        assert set(shown) - set(kept) <= {
            part for line in lines if line not in rows for part in re.split(" {2,}", line)
        }
        assert len(kept) == {24: 3, 40: 7, 50: 9, 60: 11, 80: 12}[columns]


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_lines_stand_above_the_live_view_and_nothing_is_lost(monkeypatch, clock, columns):
    """Of `say`, of print, of a part of a line; the last view stays, and lines follow it."""
    with terminal(monkeypatch, columns) as screen:
        out, err = sys.stdout, sys.stderr
        view = Screen(0, 3)
        say("the banner")
        assert screen.read() == ["the banner", ""]
        for step in (1, 2, 3):
            view.show(step, {"loss": step / 4}, step)
            say(f"a long warning {'word ' * 50}", error=True)
            print(f"printed {step}")
            print("begun", end="", file=sys.stderr)
            view.show_evaluation(step, {"loss": 3.0})
            print(f" and ended {step}", file=sys.stderr)
            screen.read()
            clock[0] += 1
        assert (sys.stdout, sys.stderr) != (out, err)
        view.end()
        view.end()
        assert (sys.stdout, sys.stderr) == (out, err)
        say("the summary")
        *above, bar, loss, last, end, nothing = screen.read()
        assert (end, nothing) == ("the summary", "") and bar.startswith("step 3/3 ") and loss == "loss 0.7500"
        assert last.startswith("loss ▁▅█ 0.2500 to 0.7500")
        text = "".join(above)
        assert "step" not in text.replace("after step", "") and text.replace(" ", "").count("word") == 150
        for step in (1, 2, 3):
            assert f"printed {step}" in above and f"begun and ended {step}" in above
            assert f"evaluation after step {step}: loss 3.0000" in above


def test_an_end_by_an_error_writes_nothing_and_leaves_a_usable_terminal(monkeypatch, clock):
    """What another rank printed below the view stays."""
    with terminal(monkeypatch, 80) as screen:
        view = Screen(0, 3)
        view.show(1, SFT, 1.0)
        shown = screen.read()
        print("the traceback of another rank", file=sys.stderr.real)  # type: ignore[attr-defined]
        view.leave()
        say("isoloss: error: mine", error=True)
        view.leave()
        lines = [*shown[:-1], "the traceback of another rank", "isoloss: error: mine", ""]
        assert screen.read() == lines
        assert "\x1b[?" not in screen.raw, "no mode of the terminal is changed: the cursor stays visible"


@pytest.mark.parametrize(("name", "no_color"), [("dumb", ""), ("unknown", ""), ("xterm-256color", "1")])
def test_dumb_terminals_get_lines_and_no_color_is_obeyed(monkeypatch, clock, name, no_color):
    with terminal(monkeypatch, 80, name) as screen:
        monkeypatch.setenv("NO_COLOR", no_color)
        view = Screen(0, 2)
        view.show(1, {"loss": 1.5}, 1.0)
        view.end()
        screen.read()
        if no_color:
            assert "━" in screen.raw and not re.search(r"\x1b\[[\d;]*[34]\d", screen.raw)
        else:
            assert screen.raw == "step 1/2  loss 1.5000  ETA 0:00:01\r\n"


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_a_bar_of_a_task_vanishes_at_its_end_or_at_a_line(monkeypatch, clock, columns):
    with terminal(monkeypatch, columns) as screen:
        with Progress("tokenizing", "rows of data.train", lambda: 300_000) as progress:
            clock[0] += 1.9
            progress.advance(1000)
            assert screen.read() == [""], "a short task shows nothing"
            clock[0] += 0.2
            progress.advance(119_000)
            first, *more = screen.read()
            assert first.startswith("tokenizing 120,000 of 300,000 rows of data.train")
            assert ("ETA 0:00:03" in first) == (columns > 60) and (more == [""]) == (columns > 60)
            say("a line", error=True)
            assert screen.read() == ["a line", ""]
            clock[0] += 0.2
            progress.advance()
            assert screen.read()[1].startswith("tokenizing 120,001 of")
            progress.advance(179_999)
            assert screen.read() == ["a line", ""]
        wait = Wait("waiting for http://127.0.0.1:30000", 600.0)
        clock[0] += 3
        wait.look()
        assert screen.read()[1].startswith("waiting for http://127.0.0.1:30000") and "0:00:03 of 0:10:00" in screen.raw
        wait.close()
        assert screen.read() == ["a line", ""]


def test_a_wait_is_told_in_few_lines_of_a_log(clock, capsys):
    wait = Wait("waiting for a server", 600.0)
    for _ in range(17):
        wait.look()
        clock[0] += 1
    assert capsys.readouterr().err.splitlines() == [
        f"waiting for a server  0:00:{seconds:02} of 0:10:00" for seconds in (5, 15)
    ]


def test_a_divergence_of_a_policy_from_itself_is_not_shown():
    assert summary({"reward_mean": 0.5, "kl": 0.0}) == "reward 0.500"
    assert summary({"reward_mean": 0.5, "kl": 1e-9}) == "reward 0.500  KL 1e-09"


def test_a_trend_is_of_the_last_ten_steps_against_ten_before():
    assert [trend([1.0] * count) for count in range(4)] == [None] * 4
    assert trend([1.0, 3.0, 4.0, 8.0]) == 4.0
    assert trend([100.0] * 5 + [1.0] * 10 + [2.0] * 9 + [4.0]) == pytest.approx(1.2)
    assert summary({"reward_mean": 0.5, "loss": 0.0}, trend=-0.25) == "reward 0.500 (-0.250)"
    view = Screen(0, 9)
    for value in (1.0, math.nan, 2.0, math.inf):
        view.add({"loss": value})
    assert view._history == [1.0, 2.0]


def test_a_curve_has_the_means_of_equal_parts():
    assert curve([0.0, 7.0, 3.5], 60) == "▁█▅"
    assert curve([0.0, 0.0, 7.0, 7.0, 1.0, 1.0], 3) == "▁█▂"
    assert curve([2.0, 2.0], 9) == "▁▁"


def test_other_processes_print_above_the_live_view(monkeypatch, clock):
    """Whole lines, also those of a process that is killed; what it began is passed on at the end."""
    with terminal(monkeypatch, 80) as screen:
        view = Screen(0, 3)
        view.show(1, {"loss": 0.5}, 1.0)
        relay = console.Relay()
        command = "echo from a reward function; echo 'and an error' >&2; printf begun; kill -9 $$"
        done = subprocess.run(["sh", "-c", command], stdout=relay.descriptor, stderr=relay.descriptor)
        relay.close()
        relay.close()
        assert done.returncode == -9
        *lines, bar, loss, nothing = screen.read()
        assert lines == ["from a reward function", "and an error", "begun"]
        assert bar.startswith("step 1/3 ") and loss == "loss 0.5000" and nothing == ""


def test_other_processes_print_to_a_log_themselves(capfd):
    relay = console.Relay()
    assert relay.descriptor == 2
    relay.close()
    assert os.fstat(2)


def test_all_parts_are_left_and_the_next_line_stands_below(monkeypatch, clock):
    with terminal(monkeypatch, 80) as screen:
        out = sys.stdout
        assert not console.is_live()
        for step in (1, 2):
            Screen(0, 3).show(step, {"loss": 0.5}, 1.0)
        assert console.is_live()
        console.leave()
        assert not console.is_live() and sys.stdout is out
        say("below")
        assert [line[:8] for line in screen.read()] == ["step 1/3", "loss 0.5", "step 2/3", "loss 0.5", "below", ""]
