"""Prompts of weighted files through the whole loop: the same shares and prompts on every layout and after a kill."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from oracles import mixture
from support.runs import rl_runs as world
from support.runs.rl_runs import config_of
from support.runs.runs import metrics_of, numbers, resumed, write_rows

from isoloss.engine.rl.config import RLConfig
from isoloss.parallel import Layout

FILES = {"many": (7, 3), "few": (2, 1)}  # rows and weight
SEED = 5
# 24 draws, of which 18 and 6 are the exact shares. No batch of three can have them.
BATCHES, PROMPTS = 8, 3
# Rewards of 0 and 1 for two completions: about half of the groups are dropped.
DYNAMIC = ("algorithm.dynamic_sampling=true", "reward.function={inputs}/rewards.py:coin")
TWO_STEPS_A_BATCH = ("algorithm.minibatches=2", f"train.steps={2 * BATCHES}")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = world.write_inputs(tmp_path_factory.mktemp("inputs"))
    for name, (rows, _) in FILES.items():
        write_rows(folder / f"{name}.jsonl", [{"prompt": f"{name}: {n} +", "answer": n} for n in range(rows)])
    return folder


@pytest.fixture(scope="module")
def run(pool, inputs, tmp_path_factory) -> Callable[..., RLConfig]:
    """run(layout, *overrides): a run on the layout, which may be killed, in a folder of its own or an earlier one."""
    files = ", ".join(f"{{path: {inputs}/{name}.jsonl, weight: {weight}}}" for name, (_, weight) in FILES.items())

    def run(layout: str, *overrides: str, killed_after: int | None = None, goes_on: RLConfig | None = None) -> RLConfig:
        named = [override.replace("{inputs}", str(inputs)) for override in overrides]
        ours = [f"data.train=[{files}]", f"train.seed={SEED}", f"train.steps={BATCHES}", f"batch.global_size={PROMPTS}"]
        ours += ["rollout.num_generations=2", "rollout.max_new_tokens=4", "checkpoint.every=2", *named]
        folder = goes_on.output_dir if goes_on else tmp_path_factory.mktemp("run") / "run"
        config = config_of(inputs, str(folder), layout, *ours)
        config = resumed(config) if goes_on else config
        pool.run(Layout.parse(layout).world_size, world.train, config, killed_after)
        return config

    return run


@pytest.fixture(scope="module")
def whole(run) -> RLConfig:
    return run("1")


def expected(draws: int) -> list[str]:
    return mixture.draws({f"{name}.jsonl": of_file for name, of_file in FILES.items()}, draws, SEED)


def drawn(config: RLConfig) -> list[str]:
    """The prompt of each draw of a run, from the ids of the completions that it was rewarded for, each named once."""
    ids = [row["id"].rsplit("/", 2) for row in metrics_of(config, "rollouts")]
    prompts = {int(draw): prompt for prompt, draw, _ in ids}
    assert sorted(ids) == sorted([prompts[draw], str(draw), str(k)] for draw in range(len(prompts)) for k in range(2))
    assert len(prompts) == metrics_of(config)[-1]["prompts_drawn"]
    return [prompts[draw] for draw in range(len(prompts))]


def shares(prompts: Sequence[str]) -> dict[str, float]:
    return {name: sum(prompt.startswith(f"{name}.") for prompt in prompts) / len(prompts) for name in FILES}


def test_shares_are_exact_over_the_run_and_hold_over_every_beginning(whole):
    prompts = drawn(whole)
    assert len(prompts) == BATCHES * PROMPTS and prompts == expected(len(prompts))
    assert shares(prompts) == pytest.approx({"many": 0.75, "few": 0.25}, abs=1e-3)
    for count in range(1, len(prompts) + 1):
        assert abs(shares(prompts[:count])["many"] - 0.75) * count <= 1
    assert {prompt for prompt in prompts if prompt.startswith("few")} == {"few.jsonl:1", "few.jsonl:2"}


@pytest.mark.parametrize("layout", ("dp2", "pp2"))
def test_any_layout_draws_the_same_prompts(run, layout):
    """Also where a batch feeds several steps, which draw nothing."""
    assert drawn(run(layout, *TWO_STEPS_A_BATCH)) == expected(BATCHES * PROMPTS)


def test_a_run_that_was_killed_goes_on_with_the_same_prompts(run, whole):
    """Step 5 is done and lost; its prompts are drawn again. Every number and completion is that of the whole run."""
    killed = run("1", killed_after=5)
    run("1", goes_on=killed)
    assert drawn(killed) == expected(BATCHES * PROMPTS)
    assert numbers(killed.output_dir) == numbers(whole.output_dir)
    assert metrics_of(killed, "rollouts") == metrics_of(whole, "rollouts")


def test_groups_that_are_dropped_count_as_drawn_on_another_layout_too(run):
    """Killed on one layout and resumed on another, amid dynamic sampling."""
    killed = run("tp2", *DYNAMIC, killed_after=5)
    run("dp2", *DYNAMIC, goes_on=killed)
    prompts = drawn(killed)
    assert len(prompts) > BATCHES * PROMPTS and prompts == expected(len(prompts))
    assert abs(shares(prompts)["many"] - 0.75) * len(prompts) <= 1
