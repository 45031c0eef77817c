"""Whole runs whose servers generate while the trainer trains."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import rl_runs
from support.runs.rl_runs import PROMPTS
from support.runs.runs import resumed, rows_of
from support.servers import server_runs
from support.servers.server_commands import DOUBLE, SGLANG

BATCH, GENERATIONS = 2, 4
CORRECTED = "algorithm.importance=token"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return server_runs.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def server(start: Callable[..., str], inputs) -> str:
    """Slow enough for the trainer to be done first."""
    command = DOUBLE.replace("{model}", str(inputs / "model"))
    return start(f"{command} --seconds-per-token 0.02 --deterministic")


# Real servers are slow to start: one worker has them all, and starts one.
@pytest.fixture(params=["double", pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.xdist_group("ahead")])])
def either(request) -> str:
    """That one, and a real one."""
    return request.getfixturevalue("server" if request.param == "double" else "real_server")


@pytest.fixture(scope="module")
def real_server(start: Callable[..., str], inputs) -> str:
    return start(SGLANG.replace("{model}", str(inputs / "model")))


def run(inputs: Path, out: Path, server: str, *overrides: str) -> list[dict]:
    assert server_runs.run([*server_runs.overrides_of(inputs, out, [server]), *overrides]) == 0
    return rows_of(out / "metrics.jsonl")


def check_prompts(out: Path, staleness: int) -> None:
    """Each draw was told of once, and those in flight are the newest; no completion is older than it may be."""
    rows, last = rows_of(out / "rollouts.jsonl"), rows_of(out / "metrics.jsonl")[-1]
    ids = [row["id"] for row in rows]
    draws = {int(id.split("/")[1]) for id in ids}
    assert len(set(ids)) == len(ids) == GENERATIONS * len(draws)
    taken = last["prompts_trained"] + last["prompts_dropped_no_variance"] + last["prompts_dropped_reward_failed"]
    assert len(draws) == taken == last["prompts_drawn"] - last["prompts_in_flight"]
    assert draws == set(range(len(draws)))
    for row in rows:
        assert row["step"] - 1 - staleness <= min(row["weight_versions"]) <= max(row["weight_versions"]) < row["step"]


@pytest.mark.parametrize("staleness", [1, 2])
def test_ahead_of_the_trainer(inputs, either, tmp_path, staleness):
    """Every batch but the first was begun before the trainer came to it, the second beside the first; evaluations come
    in between. How old the tokens of later ones are is a race of trainer and server, up to the limit."""
    more = ("train.steps=6", f"data.eval={inputs}/prompts.jsonl", "train.eval_every=3")
    metrics = run(inputs, tmp_path / "run", either, f"rollout.max_staleness={staleness}", CORRECTED, *more)
    check_prompts(tmp_path / "run", staleness)
    assert [row["prompts_in_flight"] for row in metrics] == [staleness * BATCH] * 6
    assert metrics[0]["staleness_max"] == 0 < metrics[1]["staleness_mean"]
    assert all(row["staleness_mean"] <= row["staleness_max"] <= staleness for row in metrics)
    assert len(rows_of(tmp_path / "run/eval_rollouts.jsonl")) == 3 * PROMPTS


def test_on_policy_in_waves_nothing_changes_but_rounding(inputs, server, tmp_path):
    """Log-probabilities are computed in parts, while the rest is generated: the same completions, and the same loss."""
    two = ("algorithm.minibatches=2", "train.steps=4")
    plain = run(inputs, tmp_path / "plain", server, *two)
    waves = run(inputs, tmp_path / "waves", server, *two, "rollout.waves=2")
    for name in ("loss", "grad_norm", "reward_mean", "kl"):
        assert [row[name] for row in waves] == pytest.approx([row[name] for row in plain], rel=1e-3, abs=1e-6), name
    kept = ("id", "completion", "reward", "weight_versions")
    told, wanted = (rows_of(tmp_path / name / "rollouts.jsonl") for name in ("waves", "plain"))
    assert [[row[name] for name in kept] for row in told] == [[row[name] for name in kept] for row in wanted]
    assert all(row["staleness_max"] == 0 and row["prompts_in_flight"] == 0 for row in waves)


def test_it_goes_on_where_it_was(inputs, either, tmp_path):
    """The second start takes what the first had in flight, in part as tokens of the weights before."""
    keys = ("rollout.max_staleness=1", CORRECTED, "checkpoint.every=1")
    run(inputs, tmp_path / "run", either, *keys, "train.steps=3")
    metrics = run(inputs, tmp_path / "run", either, *keys, "train.steps=6", "checkpoint.resume=true")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert metrics[3]["staleness_max"] == 1
    check_prompts(tmp_path / "run", 1)


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_every_rank_has_the_ledger(pool, inputs, server, tmp_path, layout):
    """Rank 0 alone talks to the server; killed after a step, the run goes on, on one rank more or less."""
    keys = [each for each in server_runs.overrides_of(inputs, tmp_path, [server]) if each.startswith("rollout.")]
    keys += ["rollout.max_staleness=1", CORRECTED, "rollout.waves=2", "checkpoint.every=1", "train.steps=4"]
    config = rl_runs.config_of(inputs, tmp_path / "run", layout, *keys)
    pool.run(2, rl_runs.train, config, 3)
    pool.run(1, rl_runs.train, resumed(rl_runs.config_of(inputs, tmp_path / "run", "1", *keys)))
    assert [row["step"] for row in rows_of(tmp_path / "run/metrics.jsonl")] == [1, 2, 3, 4]
    check_prompts(tmp_path / "run", 1)


def test_groups_that_finish_first(inputs, either, tmp_path):
    keys = ("rollout.max_staleness=1", "rollout.over_sample=1.5", CORRECTED, "train.steps=6")
    metrics = run(inputs, tmp_path / "run", either, *keys)
    rows = rows_of(tmp_path / "run/rollouts.jsonl")
    ids = [row["id"] for row in rows]
    assert len(set(ids)) == len(ids) == 6 * BATCH * GENERATIONS
    assert [row["prompts_in_flight"] for row in metrics] == [1] * 6 and metrics[-1]["prompts_left_over"] == 6
    assert all(row["staleness_max"] <= 1 for row in metrics)
    assert metrics[-1]["response_length_first"] > 0


def test_another_staleness_is_another_run(inputs, server, tmp_path, capsys):
    keys = [*server_runs.overrides_of(inputs, tmp_path / "run", [server]), CORRECTED]
    assert server_runs.run([*keys, "rollout.max_staleness=1", "train.steps=1"]) == 0
    capsys.readouterr()
    assert server_runs.run([*keys, "train.steps=2", "checkpoint.resume=true"]) == 2
    assert "rollout.max_staleness=0 differs from the 1" in capsys.readouterr().err
