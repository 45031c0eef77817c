"""isoloss-watch: a run that starts, goes on, is resumed, ends, dies; a folder of none; no torch."""

import fcntl
import json
import os
import subprocess
import sys
import time

import pytest

from isoloss.tools import watch

ROW = {"loss": 2.0, "seconds": 2.0, "tokens_per_second": 5000.0, "mfu": 0.5}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.yaml").write_text("train: {steps: null}\n")
    about = {"layout": "tp2", "device": "CPU, 2 core(s)", "total_steps": 4}
    (tmp_path / "run.json").write_text(json.dumps(about))
    return tmp_path


def write(run, name, rows, *, replace=False):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if replace:
        (run / "new").write_text(text)
        (run / "new").replace(run / name)
    else:
        with (run / name).open("a") as file:
            file.write(text)


def steps(*numbers):
    return [{"step": number, **ROW} for number in numbers]


def test_a_run_is_followed_to_its_end(run, monkeypatch, capsys):
    """From before its first step, over a resume that repeats a step, to the release of its lock."""
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.01)
    turns = iter([
        lambda: write(run, "eval.jsonl", [{"step": 0, "loss": 9.0}]),
        lambda: write(run, "metrics.jsonl", steps(1, 2)),
        lambda: write(run, "metrics.jsonl", steps(1), replace=True),
        lambda: write(run, "metrics.jsonl", steps(2, 3, 4)),
        lambda: write(run, "eval.jsonl", [{"step": 4, "loss": 1.0}]),
    ])  # fmt: skip
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def sleep(seconds):
            turn = next(turns, None)
            if turn is None:
                fcntl.flock(lock, fcntl.LOCK_UN)
            else:
                turn()

        monkeypatch.setattr(watch.time, "sleep", sleep)
        assert watch.main([str(run)]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "evaluation after step 0: loss 9.0000",
        "step 2/4  loss 2.0000  5,000 tokens/s  ETA 0:00:04",
        "step 1/4  loss 2.0000  5,000 tokens/s  ETA 0:00:06",
        "step 4/4  loss 2.0000 (+0.0000)  5,000 tokens/s  ETA 0:00:00",
        "evaluation after step 4: loss 1.0000",
    ]
    assert out.splitlines() == [
        f"{run}: 4 steps, layout tp2 on CPU, 2 core(s)",
        "the run goes on after step 1",
        "evaluation after step 4: loss 1.0000; before: loss 9.0000",
        "done: step 4 of 4",
    ]


def test_a_run_that_died_tells_when(run, capsys):
    write(run, "metrics.jsonl", steps(1, 2))
    (run / ".lock").touch()
    assert watch.main([str(run)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    at = time.strftime("%Y-%m-%d", time.localtime((run / "metrics.jsonl").stat().st_mtime))
    assert last.startswith(f"the run ended early, after step 2 of 4, at {at} ") and "checkpoint.resume=true" in last
    (run / "metrics.jsonl").unlink()
    assert watch.main([str(run)]) == 0
    assert "ended before its first step" in capsys.readouterr().out


def test_once_and_ctrl_c_end_it_while_the_run_goes_on(run, monkeypatch, capsys):
    write(run, "metrics.jsonl", steps(1))
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert watch.main([str(run), "--once"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "the run goes on, after step 1 of 4"

        def interrupt(seconds):
            raise KeyboardInterrupt

        monkeypatch.setattr(watch.time, "sleep", interrupt)
        assert watch.main([str(run)]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_run_without_a_step_for_long_is_told(run, capsys):
    write(run, "metrics.jsonl", steps(1))
    watched = watch.Watched(run)
    watched.look()
    ago = time.time() - 100
    os.utime(run / "metrics.jsonl", (ago, ago))
    for _ in range(3):
        watched.look()
    quiet = [line for line in capsys.readouterr().err.splitlines() if line.startswith("no step for 0:01:40")]
    assert len(quiet) == 1


def test_a_folder_that_is_none_of_a_run_is_one_line(tmp_path, run, capsys):
    for folder in (run / "nowhere", tmp_path.parent):
        assert watch.main([str(folder)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err == (
            f"isoloss: error: {folder} is no folder of a run (it has no config.yaml): give the output_dir of a run\n"
        )
    (run / "run.json").write_text("{}")
    assert watch.main([str(run)]) == 2
    assert "has no total_steps" in capsys.readouterr().err


def test_it_starts_without_torch_and_rich(run):
    write(run, "metrics.jsonl", steps(4))
    code = (
        "import sys; from isoloss.tools import watch; watch.main(sys.argv[1:]); "
        "print({'torch', 'rich'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["done: step 4 of 4", "set()"]
