"""Through the whole loop: what is generated, how often, and what is learned from it depends on no layout."""

from pathlib import Path

import pytest
from support.runs import rl_runs as world
from support.runs.rl_runs import config_of
from support.runs.runs import metrics_of

from isoloss.parallel import Layout

LAYOUTS = ("1", "tp2", "pp2", "ulysses2", "ring2", "dp2", "tp2+pp2")
EVALUATED = ("data.eval={inputs}/prompts.jsonl", "train.eval_every=2")
DYNAMIC = ("algorithm.dynamic_sampling=true", "rollout.num_generations=2", "reward.function={inputs}/rewards.py:coin")
FIVE_BATCHES = ("train.steps=5",)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return world.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def watch(pool, inputs, tmp_path):
    """The run on a layout: its configuration and what rank 0 saw; every rank saw the same."""

    def run(layout: str, *overrides: str, stale: bool = False):
        named = [override.replace("{inputs}", str(inputs)) for override in overrides]
        config = config_of(inputs, tmp_path / layout, layout, *named)
        seen, *others = pool.run(Layout.parse(layout).world_size, world.watched, config, stale)
        assert all(other == seen for other in others)
        return config, seen

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", (1.0, 0.6))
def test_a_rollout_and_the_trainer_agree_on_every_token(watch, layout, temperature):
    config, seen = watch(layout, *FIVE_BATCHES, f"rollout.temperature={temperature}")
    assert len(seen.worst) == 5
    assert max(seen.worst) <= 1e-5
    assert all(0 < row["train_rollout_logprob_diff"] <= max(seen.worst) for row in metrics_of(config))
    assert {v for c in seen.completions for v in c.versions} == {0, 1, 2, 3, 4}  # each batch by weights of its own


@pytest.mark.parametrize("layout", ("1", "tp2+pp2"))
def test_weights_that_are_not_sent_are_seen(watch, layout):
    config, seen = watch(layout, *FIVE_BATCHES, stale=True)
    first, *later = metrics_of(config)
    assert first["train_rollout_logprob_diff"] <= 1e-5 and seen.worst[0] <= 1e-5
    assert all(row["train_rollout_logprob_diff"] > 1e-3 for row in later) and min(seen.worst[1:]) > 1e-2
    for row, worst in zip(later, seen.worst[1:], strict=True):
        assert row["train_rollout_logprob_diff_max"] == pytest.approx(worst, rel=1e-3)
        assert row["train_rollout_correlation"] < first["train_rollout_correlation"]


@pytest.fixture(scope="module")
def reference(pool, inputs, tmp_path_factory):
    """The run of `test_a_run_is_the_same_on_any_layout` on one rank."""
    config = config_of(inputs, tmp_path_factory.mktemp("reference") / "run", "1", *FIVE_BATCHES, *SHAPED)
    return config, pool.run(1, world.watched, config)[0]


SHAPED = ("algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.01", "batch.global_size=3", "optim.lr=3e-3")


@pytest.mark.parametrize("layout", (*LAYOUTS[1:], "dp2+tp2"))
def test_a_run_is_the_same_on_any_layout(watch, reference, layout):
    """The same tokens come out of every batch, and losses and gradients differ by rounding."""
    tight = ("batch.max_tokens=16",) if layout == "dp2+tp2" else ()  # less than a prompt and its completion
    config, seen = watch(layout, *FIVE_BATCHES, *SHAPED, *tight)
    expected_config, expected = reference
    assert [(c.id, c.tokens, c.finish) for c in seen.completions] == [
        (c.id, c.tokens, c.finish) for c in expected.completions
    ]
    rows, wanted = metrics_of(config), metrics_of(expected_config)
    for key in ("reward_mean", "valid_tokens", "response_length_mean"):
        assert [row[key] for row in rows] == [row[key] for row in wanted]
    for key in ("grad_norm", "entropy", "kl_loss"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in wanted], rel=1e-4, abs=1e-7), key
    # Advantages of mean 0: the terms are about 1 and cancel.
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in wanted], abs=1e-5)


@pytest.mark.parametrize("layout", ("1", "dp2", "dp4"))
def test_a_step_of_fewer_completions_than_ranks(watch, layout):
    """Ranks without a sample run a row of dummies, with the fields and aggregations that the loss asks for."""
    modes = ("algorithm.kl_aggregation=seq-mean-token-mean", "algorithm.minibatches=12", "train.steps=2")
    config, _ = watch(layout, *SHAPED, *modes)
    rows = metrics_of(config)
    assert [row["sequences"] for row in rows] == [1, 1] and all(row["applied"] for row in rows)


@pytest.mark.parametrize(
    ("layout", "overrides"),
    (
        ("1", ()),
        ("1", ("batch.max_tokens=32",)),
        ("1", ("batch.max_tokens=32", "algorithm.minibatches=4", "algorithm.epochs=2")),
        ("1", ("rollout.num_generations=8", "rollout.concurrency=3")),
        ("dp2", ("batch.max_tokens=32", "algorithm.minibatches=2")),
        ("tp2+pp2", ("algorithm.epochs=2",)),
        ("ulysses2", EVALUATED),
        ("1", DYNAMIC),
        ("dp2", (*DYNAMIC, *EVALUATED, "algorithm.minibatches=2")),
    ),
    ids=lambda value: value if isinstance(value, str) else "+".join(part.partition(".")[2][:18] for part in value),
)
def test_generation_is_asked_for_once_a_batch(watch, inputs, layout, overrides):
    """Whatever the micro-batches, mini-batches, epochs and ranks; and once for a round of draws or an evaluation."""
    config, seen = watch(layout, *overrides, "train.steps=8")
    rows = metrics_of(config)
    a_batch = config.steps_per_batch
    batches = rows[::a_batch]
    rounds = int(sum(row["draw_rounds"] for row in batches))
    evaluations = len(metrics_of(config, "eval")) if config.data.eval else 0
    assert len(batches) == 8 / a_batch and evaluations == (5 if config.data.eval else 0)
    assert len(seen.calls) == seen.counted == rounds + evaluations
    assert rounds > len(batches) if config.algorithm.dynamic_sampling else rounds == len(batches)
    asked = sum(row["groups_drawn"] for row in batches) * config.rollout.num_generations
    assert sum(seen.calls) == asked + evaluations * world.PROMPTS
    if "batch.max_tokens=32" in overrides and layout == "1":
        assert max(row["micro_batches"] for row in rows) > 1
