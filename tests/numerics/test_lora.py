"""Adapters: loss and gradients are those of transformers and PEFT, and the same on every layout.

The reference that covers every family is a model of transformers with merged weights W + s B A, whose gradient G gives
those of the factors by the chain rule. It knows neither the engine's mappings nor its products.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from numerics.test_transformers_parity import (
    LAYOUTS,
    LENGTHS,
    SCALED_COSINES,
    admits,
    relative_error,
    transformers_logprobs,
    transformers_loss_and_gradients,
    transformers_model,
)
from support.models import lora as world
from support.models.families import MODELS, VOCAB, write_folder
from support.models.lora import LORA, Step
from support.models.transformers_parity import make_samples
from transformers import AutoModelForCausalLM

from isoloss.models.families.registry import read_architecture

SAMPLES = make_samples(LENGTHS, VOCAB, seed=4)
SCALE = LORA.scale(LORA.rank)


def difference(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    return max((relative_error(tensor, wanted[name]), name) for name, tensor in got.items())


@pytest.mark.parametrize("name", [name for name in MODELS if name not in SCALED_COSINES])
def test_loss_and_gradients_are_those_of_merged_weights(name, one_rank, monkeypatch, tmp_path):
    folder = write_folder(name, tmp_path / "in")
    got = world.step(folder, SAMPLES)
    factors = world.all_factors(read_architecture(str(folder)))
    merged = Path(shutil.copytree(folder, tmp_path / "merged"))
    world.merge_into(merged, factors, SCALE, turned=name == "gpt-oss")
    model = transformers_model(folder, "fp64", monkeypatch)
    targets = sum(int(sample.mask_T.sum()) for sample in SAMPLES)
    with torch.no_grad():
        base = -sum(float(transformers_logprobs(model, sample).sum()) for sample in SAMPLES) / targets
    with_merged_weights = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float64)
    for parameter, exact in zip(model.parameters(), with_merged_weights.parameters(), strict=True):
        parameter.data.copy_(exact.data)
    loss, of_weights = transformers_loss_and_gradients(model, SAMPLES, tmp_path / "gradients")
    wanted = world.gradients_of_factors(of_weights, factors, SCALE, turned=name == "gpt-oss")
    assert got.gradients.keys() == wanted.keys() == factors.keys()
    worst, where = difference(got.gradients, wanted)
    squares = sum(float(tensor.square().sum()) for tensor in wanted.values())
    print(f"loss {abs(got.loss - loss) / loss:.1e}, gradients {worst:.1e} ({where})")
    assert abs(got.loss - loss) <= 1e-10 * loss and abs(got.loss - got.base) > 1e-3
    assert worst <= 1e-10, where
    assert got.grad_norm == pytest.approx(squares**0.5, rel=1e-10)
    assert got.base == pytest.approx(base, rel=1e-10)
