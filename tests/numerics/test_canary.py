"""A step whose loss head consumed other weights than the counts promise ends the run, on every rank."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from numerics import canary

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import BatchConfig, Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from isoloss.engine.step import step_batch
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.forward_backward import CanaryError, check_canary
from isoloss.engine.step.losses import Loss, Term, negative_log_likelihood
from isoloss.parallel.aggregation import Aggregation
from isoloss.parallel.normalizer import StepCounts
from isoloss.recipes import launch


@pytest.mark.parametrize(
    ("dtype", "promised", "consumed", "raises"),
    (
        (torch.float32, 1.0, 1 + 3e-7, False),  # the rounding of fp32 weights
        (torch.bfloat16, 1.0, 1 - 3e-7, False),  # whose weights of tokens are fp32
        (torch.float32, 1.0, 1 + 3e-6, True),
        (torch.bfloat16, 1.0, 1 - 3e-6, True),
        (torch.float32, 1.0, 0.9999, True),  # one of ten thousand tokens is missing
        (torch.float32, 1000.0, 1001.0, True),  # of a sum
        (torch.float32, 1000.0, 1000.0005, False),
        (torch.float32, 0.0, 1e-4, True),  # no token is valid, and one was consumed
        (torch.float32, 0.0, 0.0, False),
        (torch.float32, 1.0, math.nan, True),
        (torch.float64, 1.0, 1 + 2e-14, False),
        (torch.float64, 1.0, 1 + 1e-12, True),
    ),
)
def test_the_tolerance_is_that_of_rounding(dtype, promised, consumed, raises):
    counts = StepCounts(7, 3, 0, promised)
    if not raises:
        check_canary(consumed, counts, dtype)
        return
    with pytest.raises(CanaryError, match="7 valid tokens in 3 sequences") as raised:
        check_canary(consumed, counts, dtype)
    assert repr(consumed) in str(raised.value) and repr(promised) in str(raised.value)


def test_every_aggregation_of_a_loss_is_watched(inputs, one_rank, monkeypatch):
    """The weights of the second term alone are wrong."""
    terms = [Term(negative_log_likelihood, Aggregation(mode), name=mode) for mode in ("token-mean", "sum")]
    tokens = torch.arange(1, 9)
    samples, engine = [Sample(tokens, tokens > 2)], Engine(Config(ModelConfig(f"{inputs}/model", from_scratch=True)))
    assert engine.evaluate(samples, Loss(tuple(terms))).weight_sum == pytest.approx(1, abs=1e-6)
    pack = step_batch.pack

    def spoiled(*arguments):
        batch = pack(*arguments)
        return dataclasses.replace(batch, weights_AN=batch.weights_AN * torch.tensor([[1.0], [1.25]]))

    monkeypatch.setattr(step_batch, "pack", spoiled)
    with pytest.raises(CanaryError, match=r"add up to 7\.5, but 6 valid tokens in 1 sequences promise 6\.0"):
        engine.evaluate(samples, Loss(tuple(terms)))


def test_terms_have_their_own_weights_and_coefficients(inputs, one_rank):
    """-log p once as a mean over tokens, once as a sum times 0.25: 12 targets make the gradient 4 times that of the
    first alone, and the loss as well."""
    mean = Term(negative_log_likelihood, Aggregation("token-mean"), name="mean")
    summed = Term(negative_log_likelihood, Aggregation("sum"), 0.25, "sum")
    tokens = torch.arange(1, 15)
    samples = [Sample(tokens[:n], tokens[:n] > 2) for n in (14, 2)]
    config = Config(ModelConfig(f"{inputs}/model", from_scratch=True), train=TrainConfig(precision="fp64"))
    engine, found = Engine(config), []
    for terms in ((mean,), (mean, summed)):
        metrics = engine.forward_backward(samples, Loss(terms))
        found.append((metrics, engine.optim_step(0.0).grad_norm))
    (one, norm), (both, norm_of_both) = found
    assert one.valid_tokens == 12 and norm > 0
    assert norm_of_both == pytest.approx(4 * norm, rel=1e-12)
    assert both.loss == pytest.approx(4 * one.loss, rel=1e-12)
    assert both.terms == pytest.approx({"mean": one.loss, "sum": 12 * one.loss}, rel=1e-12)


@pytest.mark.parametrize("fault", ("counts", "target", "micro-batch"))
def test_a_rank_that_goes_wrong_ends_the_run(fault, pool, inputs, tmp_path):
    """At its first wrong step: nothing of it is logged, and nothing saved."""
    config = Config(
        ModelConfig(f"{inputs}/model", from_scratch=True),
        data=DataConfig((f"{inputs}/rows.jsonl",), max_length=128),
        batch=BatchConfig(8, 1024),  # one micro-batch on each of two ranks
        parallel=ParallelConfig(),
        train=TrainConfig(3),
        output_dir=f"{tmp_path}/out",
    )
    said = pool.run(2, canary.told, config, fault)
    for line in said:
        assert "consumed weights that add up to" in line and "valid tokens" in line and "\n" not in line
    assert [json.loads(row)["step"] for row in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()] == [1]
    assert not (tmp_path / "out" / "checkpoints").exists() and not (tmp_path / "out" / "hf").exists()


def test_it_ends_the_recipe(arguments):
    """Not a mistake of the user: with its traceback, and one line at the end of it."""
    with (
        canary.fault("target"),
        pytest.raises(CanaryError, match="a shard, a micro-batch or a mask is wrong") as raised,
    ):
        launch.main("sft", arguments)
    assert "\n" not in str(raised.value)
    assert Path("out/metrics.jsonl").exists() and not Path("out/hf").exists()
