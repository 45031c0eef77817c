"""Steps of the optimizer are those of torch.optim.AdamW on the model of transformers: clipping, decay, bias correction.

Nothing of isoloss stands on the other side: transformers computes logits, torch the gradient, its norm, the clipping
and the step, in fp64.
"""

import math

import pytest
from support.models.families import VOCAB, write_folder
from support.models.transformers_parity import make_samples
from support.runs.optimizer_steps import Steps, by_the_engine, by_torch
from torch import Tensor

from isoloss.engine.config.schema import Config, LossConfig, ModelConfig, OptimConfig
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from isoloss.parallel import UserError

RATES = (2e-3, 5e-3, 4e-3, 3e-3, 1e-3)
BATCHES = [make_samples((5, 40, 17, 29, 2), VOCAB, seed) for seed in range(len(RATES))]
# No two numbers are alike, and eps is of the size of a clipped gradient, so that its length counts in the step.
CLIPPED = OptimConfig(lr=7e-3, weight_decay=0.3, betas=(0.8, 0.97), eps=3e-4, clip=0.1)
FREE = OptimConfig(lr=7e-3, weight_decay=0.3, betas=(0.8, 0.97), eps=3e-4, clip=0.0)
# Each step's own: all five numbers at once, one alone, the configured ones again, no clipping, and a clip of its own.
OWN = (
    {"betas": (0.6, 0.9), "eps": 5e-3, "weight_decay": 2.0, "clip": 0.3},
    {"betas": (0.95, 0.99)},
    {},
    {"clip": 0.0, "weight_decay": 0.0},
    {"eps": 1e-2, "clip": 0.05},
)
# Of the loss, the norm, and the distance that a weight moved; and half a unit in the last place of a weight each step.
TOLERANCE = {"fp64": 1e-9, "fp32": 2e-5}
ROUNDING = {"fp64": len(RATES) * 2.0**-53, "fp32": len(RATES) * 2.0**-24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Biases, norms, and a tied embedding, which is one parameter."""
    return write_folder("qwen2", tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def wanted(folder):
    """(initial weights, steps of torch) for each configuration."""
    start = by_torch(folder, FREE, [], []).weights
    return start, {optim: by_torch(folder, optim, BATCHES, RATES) for optim in (CLIPPED, FREE)}


ROWS = {
    "1-fp64": (1, "fp64", CLIPPED, {}),
    "1-fp64-unclipped": (1, "fp64", FREE, {}),
    "1-fp32-distopt": (1, "fp32", CLIPPED, {}),
    "dp2-fp32-distopt": (2, "fp32", CLIPPED, {}),
    "dp2-fp64": (2, "fp64", CLIPPED, {}),
    "tp2-fp64": (2, "fp64", CLIPPED, {"tp": 2}),
    "pp2-fp64": (2, "fp64", CLIPPED, {"pp": 2}),
    "tp2-fp32-distopt": (2, "fp32", CLIPPED, {"tp": 2}),
}


@pytest.mark.parametrize("row", ROWS)
def test_steps_are_those_of_torch_and_transformers(pool, folder, wanted, row):
    world, precision, optim, parallel = ROWS[row]
    start, expected = wanted[0], wanted[1][optim]
    assert min(expected.norms) > 2 * CLIPPED.clip  # so every step is clipped
    found = pool.run(world, by_the_engine, folder, optim, precision, BATCHES, RATES, parallel)
    check(found, expected, start, precision)


@pytest.mark.parametrize("row", ["1-fp64", "1-fp32-distopt", "dp2-fp32-distopt", "tp2-fp64"])
def test_steps_with_numbers_of_their_own_are_those_of_torch(pool, folder, wanted, row):
    world, precision, optim, parallel = ROWS[row]
    expected = by_torch(folder, optim, BATCHES, RATES, OWN)
    assert min(expected.norms) > 2 * max(own.get("clip", 0.0) for own in OWN)
    found = pool.run(world, by_the_engine, folder, optim, precision, BATCHES, RATES, parallel, OWN)
    check(found, expected, wanted[0], precision)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"lr": -1e-3}, "optim.lr=-0.001 must not be negative"),
        ({"lr": math.nan}, "optim.lr=nan must be a finite number"),
        ({"betas": [0.9, 1.0]}, r"optim.betas=\(0.9, 1.0\) must each be in \[0, 1\)"),
        ({"eps": 0.0}, "optim.eps=0.0 must be positive"),
        ({"weight_decay": -0.1}, "optim.weight_decay=-0.1 must not be negative"),
        ({"clip": -1.0}, r"optim.clip=-1.0 must not be negative \(0 switches clipping off\)"),
    ],
)
def test_numbers_out_of_bounds_are_refused_by_name(inputs, one_rank, own, message):
    """The step is as it was, and can be taken with others."""
    engine = Engine(Config(ModelConfig(f"{inputs}/model", from_scratch=True)))
    norm = engine.train_step(make_samples((5, 9), 2048), cross_entropy(LossConfig()), lr=0.0)[1].grad_norm
    engine.forward_backward(make_samples((5, 9), 2048), cross_entropy(LossConfig()))
    with pytest.raises(UserError, match=message):
        engine.optim_step(**own)
    result = engine.optim_step(0.0)
    assert result.applied and result.grad_norm == norm


def check(found: list[Steps], expected: Steps, start: dict[str, Tensor], precision: str) -> None:
    """Losses, norms and weights of all ranks, and each weight on one of them."""
    for of_rank in found:
        assert of_rank.losses == pytest.approx(expected.losses, rel=TOLERANCE[precision])
        assert of_rank.norms == pytest.approx(expected.norms, rel=TOLERANCE[precision])
        for name, weight in of_rank.weights.items():
            target = expected.weights[name]
            moved = (target - start[name]).norm()
            assert moved > 0, name
            error = (weight.double() - target).norm()
            assert error <= TOLERANCE[precision] * moved + ROUNDING[precision] * target.norm(), name
    assert {name for of_rank in found for name in of_rank.weights} == expected.weights.keys()
