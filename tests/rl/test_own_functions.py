"""The door for losses and advantages of the user's: algorithm.loss and algorithm.advantage as file.py:function."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.runs import rl_runs
from support.runs.runs import rows_of

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import Config, ModelConfig, TrainConfig
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss, TokenInputs, negative_log_likelihood
from isoloss.parallel import Layout, UserError
from isoloss.recipes import launch
from isoloss.tools.prove import __main__ as prove

FUNCTIONS = """
import torch

def known(inputs, algorithm):
    return 6 * algorithm.clip_high + 0 * inputs.logprobs_N

def squared(inputs, algorithm):
    \"\"\"An advantage's square, weighed by the probability: a number that no built-in loss gives.\"\"\"
    return inputs.fields["advantages"].square() * inputs.logprobs_N.exp() * algorithm.clip_high

def leaky(inputs, algorithm):
    \"\"\"It looks at its neighbours in the micro-batch: another layout, another loss.\"\"\"
    return inputs.logprobs_N - inputs.logprobs_N.mean()

def summed(inputs, algorithm):
    return -inputs.logprobs_N.sum()

def far_from_the_reference(inputs, algorithm):
    return inputs.fields["ref_logprobs"] - inputs.logprobs_N

def of_three(inputs, algorithm, clip_higher):
    return -inputs.logprobs_N

def mean_reward(rewards_S, group_S, valid_S):
    return rewards_S.mean()

def infinite(rewards_S, group_S, valid_S):
    return torch.arange(len(rewards_S)) / torch.zeros(len(rewards_S))

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
        return launch.main("grpo", argv), tmp_path / "out"

    return run


def test_an_advantage_of_ones_own(run, functions):
    status, folder = run(f"algorithm.advantage={functions}:centred", "rollout.num_generations=1")
    assert status == 0
    lines = rows_of(folder / "rollouts.jsonl")
    assert lines and all(line["advantage"] == line["reward"] - 0.25 for line in lines)


def test_a_loss_of_ones_own(run, functions, capsys):
    """A number that is known, whatever the completions, and no gradient, which the run says."""
    status, folder = run(f"algorithm.loss={functions}:known", "algorithm.clip_high=0.5", "data.show_rows=1")
    said, errors = capsys.readouterr()
    assert "\nprompt prompts.jsonl:1: " in said and "\\u2028" in said and "prompts.jsonl:2: " not in said
    assert re.search(
        r"\nwarning: 1 of 1 steps learned nothing: 1 with(out rewards that differ| a gradient of 0)\n", said
    )
    assert re.search(r"step 1/1  reward [\d.]+  pass@1 [\d.]+  no variance \d/2  truncated \d+%  length \d", errors)
    (row,) = rows_of(folder / "metrics.jsonl")
    assert status == 0 and row["clip_fraction"] == 0
    assert row["loss"] == row["policy_loss"] == pytest.approx(3.0, rel=1e-6) and row["grad_norm"] == 0


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
        ("algorithm.loss={}:of_three", r"must take \(inputs, algorithm\): missing a required argument: 'clip_higher'"),
        ("algorithm.advantage={}:squared", r"must take \(rewards_S, group_S, valid_S\): too many positional"),
    ],
)
def test_a_mistake_is_one_line(run, functions, capsys, override, says):
    status, folder = run(override.format(functions))
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert status == 2 and line.startswith("isoloss: error: algorithm.") and not folder.exists()
    assert re.search(says, line)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm.loss={}:summed", r"policy_loss: summed \({}:15\) returned shape \(\) instead of shape \(\d+,\): "),
        (
            "algorithm.loss={}:far_from_the_reference",
            "asks for the field 'ref_logprobs', but the samples have advantages",
        ),
        (
            "algorithm.advantage={}:mean_reward",
            r"returned shape \(\) instead of shape \(8,\): one number per completion",
        ),
        ("algorithm.advantage={}:infinite", "returned nan for completion 0: it must be finite"),
    ],
)
def test_a_result_that_is_not_one_number_each_ends_the_run(run, functions, capsys, override, says):
    status, folder = run(override.format(functions))
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert status == 2 and re.search(says.format(functions), line), line
    assert not (folder / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda inputs: inputs.logprobs_N.unsqueeze(1), r"returned shape \(3, 1\) instead of shape \(3,\)"),
        (lambda inputs: inputs.logprobs_N[:1], r"returned shape \(1,\) instead of shape \(3,\)"),
        (lambda inputs: 0.5, "returned a float instead of shape"),
        (lambda inputs: inputs.logprobs_N.detach(), "returned numbers without a gradient"),
    ],
)
def test_a_term_is_one_number_per_target_with_a_gradient(function, says):
    inputs = TokenInputs(torch.zeros(3, requires_grad=True), None, None, {}, torch.zeros(3), 1, dist.group.WORLD)
    with pytest.raises(UserError, match=r"loss: <lambda> \(.*test_own_functions.py:\d+\) " + says):
        Loss.of(function).terms[0].values(inputs)
    with torch.no_grad():
        assert Loss.of(negative_log_likelihood).terms[0].values(inputs).tolist() == [0, 0, 0]


def test_after_a_loss_that_failed_the_next_step_is_as_if_nothing_was(inputs, one_rank):
    tokens = torch.arange(1, 15)
    samples = [Sample(tokens, tokens > 2)]
    engine = Engine(Config(ModelConfig(f"{inputs}/model", from_scratch=True), train=TrainConfig(precision="fp64")))
    right = Loss.of(negative_log_likelihood)
    wanted = engine.train_step(samples, right, lr=0.0)[1].grad_norm
    for function in (lambda i: -i.logprobs_N.mean(), lambda i: i.fields["rewards"] * i.logprobs_N):
        with pytest.raises(UserError):
            engine.train_step(samples, Loss.of(function))
        assert engine.train_step(samples, right, lr=0.0)[1].grad_norm == wanted > 0
