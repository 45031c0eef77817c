"""What reward_curve reads, and its mistakes; that it needs no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from isoloss.engine.run.records import METRICS
from isoloss.tools import reward_curve


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run of two batches of two optimizer steps each; the second batch had to draw twice."""
    write(tmp_path / "eval.jsonl", [{"step": 0, "reward_mean": 0.25}, {"step": 4, "reward_mean": 0.75}])
    first, second = (
        {"prompts_drawn": 4, "groups_drawn": 4, "groups_dropped": 0},
        {"prompts_drawn": 10, "groups_drawn": 6, "groups_dropped": 2},
    )
    write(
        tmp_path / "metrics.jsonl", [{"step": n + 1, **batch} for n, batch in enumerate((first, first, second, second))]
    )
    return tmp_path


def test_a_batch_counts_once(folder):
    curve = reward_curve.read_curve(folder, "run")
    assert (curve.steps, curve.rewards) == ((0, 4), (0.25, 0.75))
    assert curve.batches == ((1, 4, 0), (3, 6, 2))
    expected = (
        "run: held-out reward 0.250 -> 0.750 (+0.500) in 4 steps; dynamic sampling dropped and redrew 2 of 10 groups"
    )
    assert reward_curve.summary(curve) == expected


def test_a_row_that_is_being_written_is_left_out(folder):
    with (folder / "eval.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')
    assert reward_curve.read_curve(folder, "run").steps == (0, 4)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["{folder}/nowhere"], "nowhere/eval.jsonl does not exist"),
        (["{folder}", "--labels", "a,b"], "--labels=a,b names 2 of 1 runs"),
        (["{folder}", "--out", "{folder}/curve.pdf"], "curve.pdf must be a .png file"),
        (["{folder}", "--out", "{folder}/nowhere/curve.png"], "in a folder that exists"),
    ],
)
def test_a_mistake_is_one_line(folder, capsys, argv, says):
    assert reward_curve.main([word.format(folder=folder) for word in argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("isoloss: error: ") and error.count("\n") == 1 and says in error


def test_files_that_are_none_of_a_run(folder, capsys):
    write(folder / "eval.jsonl", [{"step": 0, "loss": 2.0}])
    assert reward_curve.main([str(folder)]) == 2
    assert "eval.jsonl and metrics.jsonl hold no reward_mean" in capsys.readouterr().err
    (folder / "eval.jsonl").write_text("{}\nsteps\n")
    assert reward_curve.main([str(folder)]) == 2
    assert "eval.jsonl:2: not JSON" in capsys.readouterr().err


def test_a_run_without_data_eval_shows_the_reward_of_its_batches(folder):
    write(folder / "eval.jsonl", [])
    lines = (folder / METRICS).read_text().splitlines()
    write(folder / METRICS, [json.loads(line) | {"reward_mean": n // 2 / 2 - 0.5} for n, line in enumerate(lines)])
    curve = reward_curve.read_curve(folder, "run")
    assert (curve.steps, curve.rewards, curve.held_out) == ((1, 3), (-0.5, 0.0), False)
    assert reward_curve.summary(curve).startswith("run: training reward -0.500 -> 0.000 (+0.500) in 3 steps")
    assert "training batches" in reward_curve.title([curve]) and "dashed" in reward_curve.title(
        [curve, reward_curve.Curve("other", (0,), (1.0,))]
    )


def test_it_draws_without_torch(folder):
    code = (
        "import sys; from isoloss.tools import reward_curve as r; r.main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert (folder / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
