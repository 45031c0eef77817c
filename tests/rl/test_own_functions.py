"""The door for losses and advantages of the user's: algorithm.loss and algorithm.advantage as file.py:function."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support import rl_runs
from support.runs import rows_of

from isoloss.engine.rl.config import RLConfig
from isoloss.parallel import Layout
from isoloss.recipes import grpo, launch
from isoloss.tools import prove

FUNCTIONS = """
import torch

def squared(inputs, algorithm):
    \"\"\"An advantage's square, weighed by the probability: a number that no built-in loss gives.\"\"\"
    return inputs.fields["advantages"].square() * inputs.logprobs_N.exp() * algorithm.clip_high

def leaky(inputs, algorithm):
    \"\"\"It looks at its neighbours in the micro-batch: another layout, another loss.\"\"\"
    return inputs.logprobs_N - inputs.logprobs_N.mean()

def centred(rewards_S, group_S, valid_S):
    \"\"\"Less a constant.\"\"\"
    return torch.where(valid_S, rewards_S - 0.25, 0.0)
"""


@pytest.fixture
def functions(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def run(tmp_path) -> Callable[..., tuple[int, Path]]:
    """A run of one step: its status and its folder."""
    (tmp_path / "inputs").mkdir()
    inputs = rl_runs.write_inputs(tmp_path / "inputs")

    def run(*overrides: str) -> tuple[int, Path]:
        argv = [*rl_runs.overrides_of(inputs, tmp_path / "out"), "train.steps=1", *overrides]
        return launch.main("grpo", RLConfig, grpo.run, argv), tmp_path / "out"

    return run


def test_an_advantage_of_ones_own(run, functions):
    status, folder = run(f"algorithm.advantage={functions}:centred", "rollout.num_generations=1")
    assert status == 0
    lines = rows_of(folder / "rollouts.jsonl")
    assert lines and all(line["advantage"] == line["reward"] - 0.25 for line in lines)


def test_a_loss_of_ones_own(run, functions):
    status, folder = run(
        f"algorithm.loss={functions}:squared", "algorithm.clip_high=0.5", "algorithm.advantage=dr-grpo"
    )
    (row,), lines = rows_of(folder / "metrics.jsonl"), rows_of(folder / "rollouts.jsonl")
    assert status == 0 and row["clip_fraction"] == 0
    assert row["loss"] == row["policy_loss"] > 0
    most = max(line["advantage"] ** 2 for line in lines)
    assert row["loss"] <= 0.5 * most  # probabilities are at most 1


@pytest.mark.parametrize(("function", "status"), [("squared", 0), ("leaky", 1)])
def test_prove_judges_a_loss_of_ones_own(pool, functions, tmp_path, capsys, function, status):
    argv = ["--layouts", "dp2", "--loss", f"{functions}:{function}", "--out", str(tmp_path / "proof")]
    assert prove.main([*argv, "batch.global_size=4", "data.max_length=128", "data.overlong=drop"], pool) == status
    proof = json.loads((tmp_path / "proof/proof.json").read_text())
    assert str(Layout(dp=2)) in json.dumps(proof)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm.loss={}:squarred", "names no function of .*did you mean squared"),
        ("algorithm.loss=nowhere.py:f", "names a file that is not there"),
        ("algorithm.advantage={}:f", "names no function"),
        ("algorithm.advantage=grpoo", "is not one of grpo, .* or file.py:function"),
    ],
)
def test_a_mistake_is_one_line(run, functions, capsys, override, says):
    status, folder = run(override.format(functions))
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert status == 2 and line.startswith("isoloss: error: algorithm.") and not folder.exists()
    assert re.search(says, line)
