"""Rewards that cannot be had, or teach nothing: counted, masked, or told; never taken for 0."""

from pathlib import Path

import pytest
from support.runs import rl_runs as world
from support.runs.rl_runs import config_of
from support.runs.runs import metrics_of
from support.runs.training import same

from isoloss.recipes import launch

# Second completions of a prompt fail, the others get rewards that vary.
REWARDS = """
import os, time
from rewards import quarters

def spoil(fault):
    def reward(completion_tokens, id):
        return fault() if id.endswith("/1") else quarters(completion_tokens)
    return reward

def fail():
    raise RuntimeError("no idea")

raising = spoil(fail)
nan = spoil(lambda: float("nan"))
infinite = spoil(lambda: float("inf"))
word = spoil(lambda: "good")
nothing = spoil(lambda: None)
slow = spoil(lambda: time.sleep(600))
crash = spoil(lambda: os._exit(3))
zero = spoil(lambda: 0.0)

def never(completion):
    raise RuntimeError("no idea")

def third_prompt(completion_tokens, id):
    return fail() if id.startswith("prompts.jsonl:3/") else sum(completion_tokens) % 2

def two_of_five(id):
    return float(id.endswith("/0") and id.startswith(("prompts.jsonl:1/", "prompts.jsonl:4/")))

def tenth(completion):
    return 0.1

def short(prompts, completions):
    return [0.0] * (len(completions) - 1)

def long(prompts, completions):
    return [0.0] * (len(completions) + 1)
"""

REFERENCE = ("algorithm.kl_coef=0.1",)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = world.write_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "faults.py").write_text(f"import sys; sys.path.insert(0, {str(folder)!r})\n{REWARDS}")
    return folder


@pytest.fixture
def run(pool, inputs, tmp_path):
    """The run with a function of the file above, in fp64: its configuration and weights at its end."""

    def of(function: str, *overrides: str, without: str | None = None):
        given = (f"reward.function={inputs}/faults.py:{function}", "train.steps=2", "reward.timeout=3", *overrides)
        config = config_of(inputs, tmp_path / f"{function}-{without}", "1", *given, precision="fp64")
        return config, pool.run(1, world.train, config, None, None, without)[0]

    return of


@pytest.mark.parametrize(
    ("function", "says"),
    (
        ("raising", "RuntimeError: no idea"),
        ("nan", "nan"),
        ("infinite", "inf"),
        ("word", "'good'"),
        ("nothing", "returned NoneType None"),
        ("slow", "took longer than reward.timeout=3 seconds"),
        ("crash", "ended its process with status 3"),
    ),
)
def test_a_reward_that_fails_is_counted_and_masked(run, function, says):
    config, _ = run(function)
    assert [row["reward_errors"] for row in metrics_of(config)] == [2, 2]
    for row in metrics_of(config, "rollouts"):
        if row["id"].endswith("/1"):
            assert row["reward"] is None and row["masked"] and row["advantage"] == 0 and says in row["error"], row
        else:
            assert row["reward"] is not None and not row["masked"] and "error" not in row


@pytest.mark.parametrize(
    "overrides",
    (
        (),
        ("loss.aggregation=seq-mean-token-mean", "algorithm.advantage=rloo", "algorithm.entropy_coef=0.1"),
        ("algorithm.advantage=reinforce++-baseline", "loss.aggregation=prompt-mean-token-mean", *REFERENCE),
        ("algorithm.advantage=reinforce++", "algorithm.kl_in=reward", *REFERENCE),
        ("algorithm.advantage=gae", "algorithm.critic_lr=1e-2"),
    ),
    ids=("grpo", "rloo", "reinforce++-baseline", "reinforce++", "gae"),
)
def test_masked_means_as_if_it_had_never_been_generated(run, overrides):
    """The same steps as a run whose groups lack that completion; other steps than where a failure counts as 0."""
    masked, _ = run("nan", *overrides)
    absent, _ = run("zero", *overrides, without="/1")
    as_zero, _ = run("zero", *overrides)
    for key in ("loss", "grad_norm", "entropy"):
        found, wanted, wrong = ([row[key] for row in metrics_of(config)] for config in (masked, absent, as_zero))
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12), key
        assert key != "grad_norm" or found != pytest.approx(wrong, rel=1e-2)


@pytest.mark.parametrize("advantage", ("grpo", "dr-grpo", "rloo", "reinforce++-baseline"))
def test_groups_without_variance_teach_exactly_nothing(run, advantage):
    """Three rewards of 0.1 have a mean that is not 0.1: the gradient is 0 all the same, and the weights stay."""
    named = (f"algorithm.advantage={advantage}", "rollout.num_generations=3")
    config, found = run("tenth", *named)
    for row in metrics_of(config):
        assert row["groups_without_variance"] == row["groups_drawn"] == 2 and row["groups_dropped"] == 0
        assert row["loss"] == row["grad_norm"] == 0 and row["reward_mean"] == pytest.approx(0.1)
    _, untouched = run("tenth", *named, "optim.lr=0", f"output_dir={config.output_dir}-untouched")
    assert same(found, untouched)


def test_a_prompt_that_cannot_be_rewarded_does_not_end_the_run(run):
    """Not even where dynamic sampling draws nothing else in a round."""
    config, _ = run("third_prompt", "algorithm.dynamic_sampling=true", "batch.global_size=3", "train.steps=4")
    rows = metrics_of(config)
    assert len(rows) == 4 and sum(row["reward_errors"] for row in rows) >= 4
    assert not any(row["kept"] for row in metrics_of(config, "rollouts") if row["id"].startswith("prompts.jsonl:3/"))


def test_a_batch_smaller_than_its_mini_batches_has_fewer_steps(run):
    """Two of five groups vary: four completions, where there would be ten mini-batches of one."""
    given = ("algorithm.dynamic_sampling=true", "algorithm.max_draws=1", "algorithm.on_shortage=smaller")
    sizes = ("batch.global_size=5", "rollout.num_generations=2", "algorithm.minibatches=10", "train.steps=10")
    config, _ = run("two_of_five", *given, *sizes)
    rows = metrics_of(config)
    assert [row["sequences"] for row in rows] == [row["applied"] for row in rows] == [1] * 10
    assert all(row["groups_dropped"] == 3 for row in rows)
    assert [row["prompts_drawn"] for row in rows] == [5] * 4 + [10] * 4 + [15] * 2


def complain(capsys, inputs, tmp_path, *overrides: str) -> str:
    argv = [*world.overrides_of(inputs, tmp_path / "out"), *overrides]
    capsys.readouterr()
    assert launch.main("grpo", argv) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("step ")]
    assert len(lines) == 1 and lines[0].startswith("isoloss: error: "), lines
    return lines[0]


@pytest.mark.parametrize(("function", "count"), (("short", 7), ("long", 9)))
def test_a_batched_reward_of_the_wrong_length(function, count, inputs, tmp_path, capsys):
    line = complain(capsys, inputs, tmp_path, f"reward.function={inputs}/faults.py:{function}")
    assert f"faults.py:{function} returned {count} rewards for 8 completions" in line


@pytest.mark.parametrize("evaluated", (False, True))
def test_rewards_that_all_fail(evaluated, inputs, tmp_path, capsys):
    more = (f"data.eval={inputs}/prompts.jsonl",) if evaluated else ()
    line = complain(capsys, inputs, tmp_path, f"reward.function={inputs}/faults.py:never", *more)
    assert f"none of {5 if evaluated else 8} completions could be rewarded" in line
    assert "faults.py:never" in line and "RuntimeError: no idea" in line and "prompts.jsonl:" in line


def test_dynamic_sampling_that_finds_nothing(inputs, tmp_path, capsys):
    given = ("algorithm.dynamic_sampling=true", "algorithm.max_draws=3")
    line = complain(capsys, inputs, tmp_path, f"reward.function={inputs}/faults.py:tenth", *given)
    assert "algorithm.max_draws=3" in line and "only 0 of batch.global_size=2 groups" in line
    assert "6 dropped, 6 of them all right" in line and "on_shortage" not in line
    line = complain(capsys, inputs, tmp_path, f"reward.function={inputs}/faults.py:tenth", *given,
                    "algorithm.on_shortage=smaller", f"output_dir={tmp_path}/other")  # fmt: skip
    assert "only 0 of batch.global_size=2 groups" in line


def test_a_function_that_fails_among_others_leaves_strict_json(run, inputs):
    config, _ = run("nan", f"reward.function=[{inputs}/faults.py:nan,{inputs}/faults.py:tenth]")
    parts = [row["parts"] for row in metrics_of(config, "rollouts")]
    assert any(part["nan"] is None for part in parts) and all(part["tenth"] == 0.1 for part in parts)
