"""Reinforcement learning of an adapter: the rollout has it, the reference begins with it, no layout changes it."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.runs import rl_runs as world
from support.runs.rl_runs import config_of
from support.runs.runs import metrics_of

from isoloss.parallel import Layout, UserError

ADAPTER = ("lora.rank=4", "lora.alpha=16", "optim.lr=3e-2", "train.steps=4", "algorithm.kl_coef=0.1")
CRITIC = ("algorithm.advantage=gae", "algorithm.critic_lr=1e-2", "algorithm.gae_lambda=0.9")
MEGATRON = ("rollout.backend=megatron",)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return world.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def watch(pool, inputs, tmp_path_factory):
    """The run on a layout: its configuration and what rank 0 saw."""

    def run(layout: str, *overrides: str, stale: bool = False):
        config = config_of(inputs, tmp_path_factory.mktemp("runs") / "run", layout, *ADAPTER, *overrides)
        return config, pool.run(Layout.parse(layout).world_size, world.watched, config, stale)[0]

    return run


@pytest.fixture(scope="module")
def one_rank(watch):
    return watch("1", "checkpoint.export_hf=true")


def test_the_reference_is_the_initial_policy(one_rank):
    """At first the two differ by the rounding of another packing; the adapter then leaves it."""
    config, _ = one_rank
    first, *later = metrics_of(config)
    assert first["kl_loss"] < 1e-14 and all(row["kl_loss"] > 1e-6 for row in later)


def test_what_was_learned_is_exported(one_rank):
    config, _ = one_rank
    folder = Path(str(config.output_dir)) / "adapter"
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    factors = load_file(folder / "adapter_model.safetensors")
    assert all(factor.abs().sum() > 0 for factor in factors.values())  # also of B, which begins at 0
    assert not (folder.parent / "hf").exists()


@pytest.mark.parametrize("layout", ("1", "tp2+pp2"))
def test_a_rollout_and_the_trainer_agree_on_every_token(watch, one_rank, layout):
    config, seen = one_rank if layout == "1" else watch(layout)
    assert len(seen.worst) == 4 and max(seen.worst) <= 1e-5
    assert all(0 < row["train_rollout_logprob_diff"] <= max(seen.worst) for row in metrics_of(config))


def test_a_rollout_without_the_adapter_is_seen(watch):
    """verl 7495: for two months servers answered by the base."""
    config, seen = watch("1", stale=True)
    first, *later = metrics_of(config)
    assert first["train_rollout_logprob_diff"] <= 1e-5 and seen.worst[0] <= 1e-5
    assert all(row["train_rollout_logprob_diff"] > 1e-4 for row in later) and min(seen.worst[1:]) > 1e-3


@pytest.mark.parametrize("layout", ("tp2", pytest.param("dp2", marks=pytest.mark.full), "pp2", "ulysses2"))
def test_a_run_is_the_same_on_any_layout(watch, one_rank, layout):
    config, seen = watch(layout)
    expected_config, expected = one_rank
    assert [(c.id, c.tokens) for c in seen.completions] == [(c.id, c.tokens) for c in expected.completions]
    rows, wanted = metrics_of(config), metrics_of(expected_config)
    for key in ("grad_norm", "kl_loss"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in wanted], rel=1e-4, abs=1e-7), key


@pytest.mark.parametrize("layout", ("1", "tp2", pytest.param("pp2", marks=pytest.mark.full)))
def test_the_trainer_itself_generates_with_the_adapter(pool, inputs, one_rank, tmp_path, layout):
    """The tokens are those of the copy in transformers, whose weights are merged; PPO's critic has an adapter too."""
    config = config_of(inputs, tmp_path / "run", layout, *ADAPTER, *MEGATRON)
    pool.run(Layout.parse(layout).world_size, world.train, config)
    rows, wanted = metrics_of(config), metrics_of(one_rank[0])
    assert [r["tokens"] for r in metrics_of(config, "rollouts")] == [
        r["tokens"] for r in metrics_of(one_rank[0], "rollouts")
    ]
    assert [row["grad_norm"] for row in rows] == pytest.approx([row["grad_norm"] for row in wanted], rel=1e-4)
    assert all(row["train_rollout_logprob_diff"] <= 1e-5 for row in rows)


def test_a_critic_learns_by_an_adapter_of_its_own(pool, inputs, tmp_path):
    """And by its head. Models stay as they were, of policy and critic."""
    config = config_of(inputs, tmp_path / "run", "1", *ADAPTER, *CRITIC, *MEGATRON, "algorithm.epochs=2")
    before = pool.run(1, world.train, config_of(inputs, tmp_path / "none", "1", *ADAPTER, *CRITIC, "optim.lr=0",
                                                "algorithm.critic_lr=0", *MEGATRON))[0]  # fmt: skip
    after = pool.run(1, world.train, config)[0]
    assert before.keys() == after.keys()
    moved = {name for name in after if (after[name] != before[name]).any()}
    trained = {name for name in after if ".lora_" in name} | {"critic/output_layer.weight"}
    assert moved == trained and any(name.startswith("critic/decoder") for name in trained)
    losses = [row["value_loss"] for row in metrics_of(config)]
    assert losses[1] < losses[0]  # of the same samples


def test_merged_weights_in_bf16_are_refused(inputs):
    with pytest.raises(UserError, match=r"rollout.backend='transformers' generates by merged weights, and bf16 rounds"):
        config_of(inputs, "out", "1", *ADAPTER, "train.precision=bf16")
