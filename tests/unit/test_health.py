"""Runs that learn nothing, or something odd, say so: checks over rows of metrics made by hand."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from isoloss.engine.config.schema import ModelConfig
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig, RLDataConfig, RolloutConfig
from isoloss.engine.rl.health import FIRST_ERROR, FIRST_STEPS, STEADY_BATCHES, watched
from isoloss.engine.run.health import AGAIN, DEAD_STEPS, Health, Watched

SFT = {"loss": 2.0, "grad_norm": 1.5, "lr": 1e-3, "valid_tokens": 10, "applied": 1}
RL = SFT | {
    "reward_mean": 0.5, "reward_std": 0.5, "reward_errors": 0, "reward_timeouts": 0, "response_length_mean": 100.0,
    "truncated_fraction": 0.1, "groups_drawn": 4, "groups_without_variance": 1, "entropy": 2.0,
    "train_rollout_logprob_diff": 0.01, "reward/a": 0.5, "reward/b": 0.25,
}  # fmt: skip
Row = Mapping[str, Any]


def config(algorithm: Mapping[str, Any] = {}, **rollout) -> RLConfig:
    return RLConfig(
        ModelConfig("somewhere"),
        data=RLDataConfig(),
        algorithm=AlgorithmConfig(**algorithm),
        rollout=RolloutConfig(**{"num_generations": 4, "max_new_tokens": 128} | rollout),
    )


def said(rows: Iterable[Row], watching: Watched | None = None) -> list[str]:
    health = Health(watching or Watched())
    return [line for step, row in enumerate(rows, 1) for line in health.warnings(step, row)]


def varying(count: int, **changed) -> list[Row]:
    """Rows in which the parts of the reward vary from batch to batch."""
    return [RL | {"reward/a": 0.5 + n / 100, "reward/b": 0.25 - n / 100} | changed for n in range(count)]


def test_a_healthy_run_says_nothing():
    assert said([SFT] * 100) == [] and said(varying(100), watched(config())) == []
    assert Health(Watched()).summary() == []


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"lr": 0.0}, "the learning rate is 0, so no weight changes: set optim.lr"),
        ({"groups_without_variance": 4, "reward_mean": 1.0}, "in none of 4 groups (their mean is 1)"),
        ({"reward_errors": 8, FIRST_ERROR: "x:1/0/0: f: KeyError in r.py:3"}, "8 completions .* first: x.*r.py:3"),
        ({"reward_errors": 1}, "1 completions of the batch have no reward and are masked; fix reward.function"),
        ({"reward_timeouts": 2}, "reward.timeout"),
        ({"truncated_fraction": 1.0}, "all completions were truncated at rollout.max_new_tokens=128: "),
        ({"truncated_fraction": 0.5}, "50% of the completions were truncated"),
        ({"valid_tokens": 0}, "no token was a target"),
        ({"train_rollout_logprob_diff": 0.11}, r"differ by 0.11 nats .* set algorithm.importance=token"),
    ],
)
def test_what_one_step_shows_is_said_at_once_and_seldom(row, says):
    """With the key that helps; again while it lasts, after AGAIN steps."""
    health, told = Health(watched(config())), {}
    for step, each in enumerate(varying(2 * AGAIN, **row), 1):
        if lines := health.warnings(step, each):
            (told[step],) = lines
    assert list(told) == [1, AGAIN + 1]
    pattern = says if ".*" in says else re.escape(says)
    assert all(re.match(f"step {step}: warning: .*{pattern}", line) for step, line in told.items()), told


def test_what_comes_and_goes_is_said_no_more_often():
    rows = [{**row, "reward_timeouts": n % 2} for n, row in enumerate(varying(AGAIN))]
    assert len(said(rows, watched(config()))) == 1


@pytest.mark.parametrize(
    ("row", "same"),
    [
        ({"truncated_fraction": 0.49}, "truncated"),
        ({"groups_without_variance": 3}, "differ"),
        ({"train_rollout_logprob_diff": math.nan}, "nats"),
        ({"train_rollout_logprob_diff": 0.1}, "nats"),
    ],
)
def test_what_is_not_enough_to_be_said(row, same):
    assert said([RL | row], watched(config())) == []


@pytest.mark.parametrize("advantage", ["reinforce++", "gae", "mine.py:advantage"])
def test_advantages_over_the_batch_need_rewards_that_differ_in_it(advantage):
    watching = watched(config({"advantage": advantage}, num_generations=1))
    assert said([RL | {"groups_without_variance": 4}], watching) == []
    (line,) = said([RL | {"groups_without_variance": 4, "reward_std": 0.0}], watching)
    assert f"between no two completions (their mean is 0.5), so algorithm.advantage={advantage}" in line


def test_a_mismatch_is_no_news_where_the_policy_has_moved():
    row = RL | {"train_rollout_logprob_diff": 5.0}
    moved = {"old_logprobs": "rollout", "minibatches": 2}
    assert said([row], watched(config(moved))) == []
    (line,) = said([row], watched(config({"old_logprobs": "rollout"})))
    assert "importance=token" not in line  # it would count the difference twice


def test_masked_completions_are_named_beside_the_key():
    (line,) = said([RL | {"truncated_fraction": 0.75}], watched(config({"mask_truncated": True})))
    assert "75%" in line and "algorithm.mask_truncated=true masks them" in line


@pytest.mark.parametrize(
    ("key", "steady", "ends", "says"),
    [
        ("response_length_mean", 199.0, 200.0, "have 200 tokens, and had 100 in the first steps"),
        ("entropy", 0.2, 0.19, "the entropy is 0.19, and was 2 in the first steps"),
    ],
)
def test_what_is_compared_with_the_first_steps(key, steady, ends, says):
    """By their median: a first step that is an outlier decides nothing."""
    first = [{key: RL[key]}] * (FIRST_STEPS - 1) + [{key: 1e6}]
    rows = [RL | row | {"reward/a": n / 100, "reward/b": n} for n, row in enumerate([*first, {key: steady}])]
    assert said(rows, watched(config())) == []
    (line,) = said([*rows, rows[-1] | {key: ends}], watched(config()))
    assert line.startswith(f"step {FIRST_STEPS + 2}: ") and says in line
    resumed = Health(watched(config()), rows)
    assert resumed.warnings(FIRST_STEPS + 2, rows[-1] | {key: ends}) == [line]


def test_the_entropy_of_a_step_without_targets_is_none():
    rows = varying(FIRST_STEPS) + [RL | {"entropy": 0.0, "valid_tokens": 0}]
    assert not any("entropy" in line for line in said(rows, watched(config())))


def test_a_part_of_the_reward_that_is_always_the_same():
    steps = 2 * STEADY_BATCHES  # two a batch
    rows = [RL | {"reward/a": n // 2 / 100} for n in range(steps)]
    (line,) = said(rows, watched(config({"minibatches": 2})))
    assert line.startswith(f"step {steps}: ") and "(b has been 0.25 in 10 batches)" in line and "reward.weights" in line
    rows[5] = rows[5] | {"reward/b": 0.26}
    assert said(rows, watched(config({"minibatches": 2}))) == []


@pytest.mark.parametrize("row", [SFT, RL])
def test_a_gradient_of_0_that_lasts(row):
    dead = row | {"grad_norm": 0.0}
    watching = Watched() if row is SFT else watched(config())
    assert said([dead] * (DEAD_STEPS - 1) + [row] + [dead] * (DEAD_STEPS - 1), watching) == []
    (line,) = said([row] + [dead] * DEAD_STEPS, watching)
    assert line.startswith(f"step {DEAD_STEPS + 1}: ") and "gradient has been 0 for 3 steps" in line
    assert "optim.lr (it is 0.001 now)" in line


def test_a_gradient_of_0_for_which_there_is_a_reason_is_told_by_the_reason():
    rows = varying(9, grad_norm=0.0, groups_without_variance=4)
    (line,) = said(rows, watched(config()))
    assert "nothing to compare" in line
    assert said([SFT | {"grad_norm": 0.0, "valid_tokens": 0}] * 9) == []


def test_the_summary_counts_the_steps_that_learned_nothing():
    health = Health(watched(config()), [RL | {"grad_norm": 0.0}, RL])
    rows = [
        RL | {"valid_tokens": 0, "applied": 0},
        RL | {"applied": 0},
        RL | {"lr": 0.0},
        *[RL | {"groups_without_variance": 4, "grad_norm": 0.0}] * 2,
        *[RL] * 1000,
    ]
    for step, row in enumerate(rows, 3):
        health.warnings(step, row)
    assert health.summary() == [
        "warning: 6 of 1,007 steps learned nothing: 2 without rewards that differ, 1 with a gradient of 0, "
        "1 without a target, 1 not applied, 1 with a learning rate of 0"
    ]
