"""What goes wrong without an error is found and named: a spike, a rank with other weights, a rank that is slow."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
from cli import trouble
from support.runs.runs import numbers, rows_of
from support.runs.training import config_of, samples, size

from isoloss.engine.config.schema import Config, TrainConfig
from isoloss.engine.data.dataset import step_indices
from isoloss.engine.instruments.files import JsonLines
from isoloss.engine.run.health import Share, slow_ranks
from isoloss.engine.run.spikes import FEWEST, BadStepGuard
from isoloss.engine.step.engine import Engine, Limits, OptimResult
from isoloss.engine.step.forward_backward import StepMetrics
from isoloss.engine.step.losses import Loss, Term
from isoloss.engine.step.replica_check import minority
from isoloss.parallel import UserError
from isoloss.recipes import launch
from isoloss.tools.prove.parity import freeze

# ---- spikes ---------------------------------------------------------------------------------------------------------


def step(guard: BadStepGuard, number: int, loss: float = 2.0, norm: float = 1.0) -> None:
    metrics = StepMetrics(loss, abs(loss), 1.0, 10, 10, 10, 1, 1)
    sample = dataclasses.replace(samples()[0], id="a.jsonl:3")
    guard.check(number, metrics, OptimResult(norm, 1e-3, True), [sample])


def guard_after(steps: int, tmp_path: Path, watched=("loss", "grad_norm"), **options) -> BadStepGuard:
    guard = BadStepGuard(TrainConfig(**options), watched, None, JsonLines(tmp_path / "bad_steps.jsonl", 0))
    for number in range(1, steps + 1):
        step(guard, number, 2.0 + number % 2, 1.0 + number % 2)  # medians 2.5 and 1.5 of an even number of steps
    return guard


def test_the_limits_are_a_multiple_of_the_median(tmp_path):
    assert guard_after(FEWEST - 1, tmp_path).limits() == Limits()
    guard = guard_after(FEWEST, tmp_path, spike_factor=4.0)
    assert guard.limits() == Limits(10.0, 6.0) and guard.apply_limits() == Limits()
    assert guard_after(FEWEST, tmp_path, spike_factor=4.0, skip_spikes=True).apply_limits() == Limits(10.0, 6.0)
    assert guard_after(FEWEST, tmp_path, ("grad_norm",), spike_factor=4.0).limits() == Limits(math.inf, 6.0)
    assert guard_after(FEWEST, tmp_path, spike_factor=None).limits() == Limits()


def test_a_spike_is_told_and_not_usual_from_then_on(tmp_path, capsys):
    guard = guard_after(FEWEST, tmp_path, spike_factor=4.0)
    step(guard, 11, norm=1.5)
    assert capsys.readouterr().err == ""
    for number in (12, 13, 14, 15):
        step(guard, number, norm=6.1)  # applied, so that they end nothing; were they usual, the median would follow
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 4 and told[0].startswith("step 12: loss 2, gradient norm 6.1: grad_norm above 6, 4 times")
    rows = rows_of(tmp_path / "bad_steps.jsonl")
    assert [row["step"] for row in rows] == [12, 13, 14, 15]
    assert rows[0]["samples"] == ["a.jsonl:3"] and rows[0]["applied"] and "grad_norm" in rows[0]["why"]
    JsonLines(tmp_path / "bad_steps.jsonl", 13)  # of a run that goes on after step 13
    assert [row["step"] for row in rows_of(tmp_path / "bad_steps.jsonl")] == [12, 13]


def test_too_many_spikes_in_a_row_end_the_run_that_skips_them(tmp_path):
    guard = guard_after(FEWEST, tmp_path, spike_factor=4.0, skip_spikes=True, max_bad_steps=2)
    step(guard, 11, loss=11.0)
    step(guard, 12)
    again = BadStepGuard(TrainConfig(spike_factor=4.0, skip_spikes=True, max_bad_steps=2), state=guard.state())
    assert again.limits() == guard.limits()
    step(again, 13, loss=11.0)
    resumed = BadStepGuard(TrainConfig(spike_factor=4.0, skip_spikes=True, max_bad_steps=2), state=again.state())
    with pytest.raises(UserError, match=r"train\.max_bad_steps=2 .* up to step 14 \(loss 11\.0.*bad_steps\.jsonl"):
        step(resumed, 14, loss=11.0)


@pytest.mark.parametrize("layout", ["1", "dp2", "tp2+pp2"])
def test_a_step_above_a_limit_is_not_applied(pool, inputs, layout):
    config, frozen = config_of(inputs, layout), freeze(samples())
    _, _, loss, norm = pool.run(size(layout), trouble.limited, config, frozen, (math.inf, math.inf))[0]
    for limits, applied in {
        (loss, norm): True,
        (math.nextafter(loss, 0), norm): False,
        (loss, math.nextafter(norm, 0)): False,
    }.items():
        found = pool.run(size(layout), trouble.limited, config, frozen, limits)
        assert found[0] == (applied, applied, loss, norm), limits


@pytest.fixture
def spike(monkeypatch):
    """The gradient of optimizer step 12 is a hundred times too large, the loss as well."""
    train_step, done = Engine.train_step, []

    def spiked(self, step_samples, loss, *rest):
        done.append(step_samples)
        if len(done) == 12:
            loss = Loss(tuple(Term(lambda t, of=term: 100 * of.values(t), term.aggregation) for term in loss.terms))
        return train_step(self, step_samples, loss, *rest)

    monkeypatch.setattr(Engine, "train_step", spiked)


@pytest.mark.parametrize("skip", [False, True])
def test_the_samples_of_a_spike_are_named(skip, spike, arguments, inputs, capsys):
    argv = [*arguments, "train.steps=14", "optim.lr=1e-4", f"train.skip_spikes={skip}", "checkpoint.every=13"]
    assert launch.main("sft", argv) == 0
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "times the median" in line]
    assert told.startswith("step 12: loss ") and told.endswith("its samples are in out/bad_steps.jsonl")
    (row,) = rows_of("out/bad_steps.jsonl")
    lines = step_indices(len(rows_of(inputs / "rows.jsonl")), 11, 4, 0) + 1
    assert row["samples"] == [f"{inputs}/rows.jsonl:{line}" for line in lines]
    assert (row["step"], row["applied"]) == (12, not skip)
    assert [each["applied"] for each in numbers("out")] == [int(not (skip and k == 12)) for k in range(1, 15)]


# ---- ranks with other weights ---------------------------------------------------------------------------------------

NORM, MATRIX = "final_layernorm.weight", "layers.0.mlp.linear_fc2.weight"


@pytest.mark.parametrize("layout", ["dp4", "ulysses2+ring2", "dp2+tp2", "tp2+pp2"])
@pytest.mark.parametrize("distributed_optimizer", (True, False), ids=("distopt", "plainopt"))
def test_all_that_hold_a_weight_hold_the_same(pool, inputs, layout, distributed_optimizer):
    config = config_of(inputs, layout, distributed_optimizer=distributed_optimizer)
    assert pool.run(size(layout), trouble.divergence, config, freeze(samples()), (), "") == [(0, "")] * size(layout)


@pytest.mark.parametrize(
    ("layout", "victims", "weight", "told"),
    [
        ("dp4", (2,), MATRIX, "rank 2 "),
        ("dp4", (1, 3), NORM, "ranks 0, 1, 2, 3 "),
        ("ulysses2", (1,), MATRIX, "ranks 0, 1 "),
        ("tp2", (0,), NORM, "ranks 0, 1 "),
        ("dp3+tp2", (4,), MATRIX, "rank 4 "),
    ],
)
def test_a_flipped_bit_is_found_and_its_rank_named(pool, inputs, layout, victims, weight, told):
    found = pool.run(size(layout), trouble.divergence, config_of(inputs, layout), freeze(samples()), victims, weight)
    for before, error in found:
        assert before == 0 and re.match(rf"after step 2 the weights of {told}are not those", error), error
        assert f"{weight} is the first" in error and "\n" not in error


@pytest.mark.parametrize(("layout", "told"), [("dp4+ep2", "ranks 0, 2 "), ("dp6+ep2", "rank 0 ")])
def test_a_flipped_bit_of_an_expert_is_found(pool, inputs, tiny_hf, layout, told):
    """Of the first expert, which every second rank holds."""
    config = config_of(inputs, layout)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(tiny_hf("qwen3-moe"))))
    of_vocab = [dataclasses.replace(sample, tokens_T=sample.tokens_T % 100) for sample in samples()]
    weight = "layers.1.mlp.experts.local_experts.0.linear_fc2.weight"
    found = pool.run(size(layout), trouble.divergence, config, freeze(of_vocab), (0,), weight)
    assert len(found) == size(layout)
    for before, error in found:
        assert before == 0 and error.startswith(f"after step 2 the weights of {told}are not those") and weight in error


def test_a_part_that_only_one_rank_holds_is_compared_with_nothing(pool, inputs):
    found = pool.run(2, trouble.divergence, config_of(inputs, "tp2"), freeze(samples()), (0,), MATRIX)
    assert found == [(0, "")] * 2


@pytest.mark.parametrize(("every", "saved"), [(2, 2), (100, 2), (0, 6)])
def test_no_checkpoint_holds_weights_that_differ(pool, inputs, tmp_path, every, saved):
    """A bit flips in step 4, of which a checkpoint is due. (With the distributed optimizer the next step would give the
    rank its weights anew.)"""
    argv = [
        f"model.path={inputs}/model", "model.from_scratch=true", f"data.train={inputs}/rows.jsonl",
        "data.max_length=128", "batch.global_size=4", "batch.max_tokens=256", "train.steps=6", "optim.lr=0",
        f"output_dir={tmp_path}/out", f"train.check_replicas_every={every}", "checkpoint.every=2", "checkpoint.keep=9",
    ]  # fmt: skip
    config = launch.compose_config("sft", Config, argv)[0]
    ended = pool.run(2, trouble.train_with_a_flip, config, 4, 1)
    steps = sorted(int(path.name.removeprefix("step_")) for path in (tmp_path / "out/checkpoints").glob("step_*"))
    assert steps[-1] == saved
    for told in ended:
        assert told == "done" if every == 0 else told.startswith("after step 4 the weights of ranks 0, 1 are not")


@pytest.mark.parametrize(
    ("values", "places"), [([5, 5, 5], []), ([5, 7, 5], [1]), ([5, 7], [0, 1]), ([1, 2, 2, 1], [0, 1, 2, 3]), ([3], [])]
)
def test_who_is_in_the_minority(values, places):
    assert minority(values) == places


# ---- ranks that are slow --------------------------------------------------------------------------------------------


def shares(*busy_and_cost: tuple[float, float]) -> list[Share]:
    return [Share(busy, cost, f"node{rank}") for rank, (busy, cost) in enumerate(busy_and_cost)]


def test_who_is_slow():
    (line,) = slow_ranks(shares((10, 1), (10, 1), (20, 1), (11, 1)), 25.0)
    assert line.startswith("rank 2 on node2 is slow: it needs 2.0 times the seconds of the others for the same work")
    assert "wait for it 40% of the time" in line
    assert slow_ranks(shares((10, 1), (20, 2), (30, 3)), 40.0) == []  # as much slower as it has more to do
    assert slow_ranks(shares((20, 1), (10, 0.4), (10, 0.4)), 25.0) == []
    assert slow_ranks(shares((10, 1), (14, 1)), 20.0) == []
    assert slow_ranks(shares((0.1, 1), (0.4, 1)), 20.0) == []  # of no account
    assert slow_ranks(shares((10, 1), (0, 0)), 20.0) == slow_ranks(shares((10, 1)), 20.0) == []


@pytest.mark.parametrize("victim", [1, None])
def test_a_rank_that_is_slow_is_named(pool, inputs, tmp_path, victim):
    argv = [
        f"model.path={inputs}/model", "model.from_scratch=true", f"data.train={inputs}/rows.jsonl",
        "data.max_length=128", "batch.global_size=4", "batch.max_tokens=1024", "train.steps=45",
        f"output_dir={tmp_path}/out",
    ]  # fmt: skip
    config = launch.compose_config("sft", Config, argv)[0]
    (told, host), _ = pool.run(2, trouble.train_with_a_straggler, config, victim, 0.1)
    if victim is None:
        assert told == []
        return
    assert len(told) == 2 and told[1].startswith(f"steps 21 to 40: rank 1 on {host} is slow: it needs ")
