"""A run whose trainer makes room for what generates learns what one learns that keeps its device."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.ranks import leaving
from support.runs import rl_runs
from support.runs.rl_runs import config_of
from support.runs.runs import metrics_of, numbers, resumed
from support.runs.training import merged, same

from isoloss.engine.rl.config import RLConfig
from isoloss.parallel import Layout

# A critic, a reference on the device, rounds of draws, evaluations, several steps a batch.
EVERYTHING = (
    "algorithm.advantage=gae", "algorithm.critic_lr=1e-2", "algorithm.kl_coef=0.1", "algorithm.reference_offload=false",
    "algorithm.dynamic_sampling=true", "rollout.num_generations=2", "reward.function={inputs}/rewards.py:coin",
    "algorithm.minibatches=2", "train.steps=6", "data.eval={inputs}/prompts.jsonl", "train.eval_every=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return rl_runs.write_inputs(tmp_path_factory.mktemp("inputs"))


def given(inputs: Path, out: Path, layout: str, precision: str, *keys: str) -> RLConfig:
    named = [key.replace("{inputs}", str(inputs)) for key in (*EVERYTHING, *keys)]
    config = config_of(inputs, out, layout, *named, precision=precision)
    distributed = precision == "bf16" or None
    return replace(config, parallel=replace(config.parallel, distributed_optimizer=distributed))


@pytest.mark.parametrize(("layout", "precision"), (("1", "fp32"), ("dp2", "bf16")))
def test_everything_is_bit_equal(pool, inputs, tmp_path, layout, precision):
    """Metrics, completions and weights; also where the run is killed amid a batch, and goes on."""
    stays = given(inputs, tmp_path / "stays", layout, precision)
    leaves = given(inputs, tmp_path / "leaves", layout, precision, "rollout.colocated=true", "checkpoint.every=3")
    size = Layout.parse(layout).world_size
    wanted = pool.run(size, leaving.loop, stays)
    pool.run(size, leaving.loop, leaves, 5)
    found = pool.run(size, leaving.loop, resumed(leaves))
    assert numbers(leaves.output_dir) == numbers(stays.output_dir)
    for name in ("rollouts", "eval", "eval_rollouts"):
        assert metrics_of(leaves, name) == metrics_of(stays, name)
    assert same(merged([each.weights for each in found]), merged([each.weights for each in wanted]))
    for each in wanted:
        assert all(weights and gradients for weights, gradients in each.generating)
    for each in found:
        assert each.generating and not any(map(any, each.generating))  # nothing of it was on the device
        assert each.sending and all(weights and not gradients for weights, gradients in each.sending)
