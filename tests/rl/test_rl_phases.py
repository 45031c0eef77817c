"""Killed at any moment of a reinforcement learning step, a run goes on as if nothing had been."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.runs import rl_runs as world
from support.runs.phases import GRPO, LOAD
from support.runs.rl_runs import config_of
from support.runs.runs import metrics_of, numbers, resumed
from support.runs.training import same

from isoloss.engine.checkpoint import checkpoint
from isoloss.engine.rl.config import RLConfig
from isoloss.tools.prove.rank_pool import WorkerError, WorkerPool

FILES = ("rollouts", "eval", "eval_rollouts")


@pytest.fixture(scope="module")
def ranks() -> Iterator[WorkerPool]:
    """A pool of its own, as its workers are killed."""
    with WorkerPool(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return world.write_inputs(tmp_path_factory.mktemp("inputs"))


def config(inputs: Path, out: Path) -> RLConfig:
    """Two batches of two optimizer steps, saved beside training and evaluated after each step."""
    more = (f"data.eval={inputs}/prompts.jsonl", "train.eval_every=1", "checkpoint.every=1", "checkpoint.keep=2")
    return config_of(inputs, out, "1", "algorithm.minibatches=2", "train.steps=4", *more)


@pytest.fixture(scope="module")
def undisturbed(ranks, inputs, tmp_path_factory):
    """(configuration of a run that nothing happened to, its last weights)."""
    whole = config(inputs, tmp_path_factory.mktemp("undisturbed") / "out")
    ((weights, steps),) = ranks.run(1, world.train_and_count, whole)
    assert steps == [1, 2, 3, 4]
    return whole, weights


@pytest.mark.parametrize("moment", [each.name for each in GRPO])
def test_killed_at_a_moment_of_a_step(ranks, undisturbed, inputs, tmp_path, moment):
    """SIGKILL, the second time that it comes. Nothing but the step under way, and the one whose save was, is done
    again; each prompt is learned from once; numbers, completions and weights are the same, bit for bit."""
    whole, weights = undisturbed
    parts = config(inputs, tmp_path / "out")
    loading = moment in {each.name for each in LOAD}
    for at, passing in (("saved", 2), (moment, 1)) if loading else ((moment, 2),):
        with pytest.raises(WorkerError, match="a worker process died"):
            ranks.run(1, world.train_until, resumed(parts), at, passing)
    newest = [
        int(folder.name.removeprefix("step_")) for folder in checkpoint.newest_first(tmp_path / "out/checkpoints")
    ]
    done = [row["step"] for row in metrics_of(parts)] if (tmp_path / "out/metrics.jsonl").read_text() else [0]
    assert max(newest, default=0) >= done[-1] - 2
    ((found, steps),) = ranks.run(1, world.train_and_count, resumed(parts))
    assert steps == list(range(max(newest, default=0) + 1, 5))
    assert numbers(parts.output_dir) == numbers(whole.output_dir)
    for name in FILES:
        assert metrics_of(parts, name) == metrics_of(whole, name), name
    draws = [row["id"] for row in metrics_of(parts, "rollouts")]
    assert len(set(draws)) == len(draws) == 2 * 2 * 4
    assert same(found, weights)
    left = sorted(path.name for path in (tmp_path / "out/checkpoints").iterdir())
    assert left == ["step_00000003", "step_00000004"]
