"""An engine on a tiny Hugging Face folder, for tests/numerics/test_transformers_parity.py; runs on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import (
    BatchConfig,
    Config,
    LossConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from isoloss.engine.step.optimizer import global_grad_norm
from isoloss.models.weights.weight_map import weight_map

TOKEN_MEAN = cross_entropy(LossConfig())


def make_engine(folder: Path, precision: str, from_scratch: bool = False, max_tokens: int = 128, **parallel) -> Engine:
    """Micro-batches of so few tokens that a step of a few sequences has several."""
    return Engine(
        Config(
            model=ModelConfig(path=str(folder), from_scratch=from_scratch),
            batch=BatchConfig(max_tokens=max_tokens),
            parallel=ParallelConfig(**parallel),
            # AdamW divides by a gradient's size: with a small eps it would make whole steps of rounding errors.
            optim=OptimConfig(lr=1e-2, schedule="constant", weight_decay=0.1, eps=1e-4),
            train=TrainConfig(precision=precision),
        )
    )


def make_samples(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[Sample]:
    """Random sequences with random masks; the last one has no target at all."""
    random = torch.Generator().manual_seed(seed)
    samples = []
    for index, length in enumerate(lengths):
        tokens = torch.randint(vocab_size, (length,), generator=random)
        mask = torch.rand(length, generator=random) < 0.7
        mask[0] = False
        samples.append(Sample(tokens, mask & (index < len(lengths) - 1)))
    return samples


def gradients_by_hf_name(engine: Engine) -> dict[str, Tensor]:
    return _by_hf_name(engine, engine.gradients())


def weights_by_hf_name(engine: Engine) -> dict[str, Tensor]:
    return _by_hf_name(engine, engine.weights())


def _by_hf_name(engine: Engine, named) -> dict[str, Tensor]:
    """Tensors that hold all experts are stacked from this rank's share of them."""
    weights = {weight.name: weight for weight in weight_map(engine.arch)}
    tensors: dict[str, Tensor] = {}
    rows: dict[str, list[Tensor]] = {}
    for name, whole in named:
        for part, tensor in zip(weights[name].parts, weights[name].mapping.split(whole)):
            if part.row is None:
                tensors[part.tensor] = tensor.clone()
            else:
                rows.setdefault(part.tensor, []).append(tensor.clone())
    return tensors | {name: torch.stack(experts) for name, experts in rows.items()}


@dataclass(frozen=True)
class Evaluated:
    """logits: of the samples. gradients: of this rank's share of the weights, by Megatron-Core name."""

    logits: Tensor
    grad_norm: float
    gradients: dict[str, Tensor]


def evaluate(folder: Path, samples: Sequence[Sample], parallel: dict) -> Evaluated:
    """A step in fp64."""
    engine = make_engine(folder, "fp64", **parallel)
    logits = torch.cat(engine.logits(samples))
    engine.forward_backward(samples, TOKEN_MEAN)
    gradients = {name: gradient.clone() for name, gradient in engine.gradients()}
    engine.optimizer.prepare_grads()
    return Evaluated(logits, global_grad_norm(engine.optimizer), gradients)


@dataclass(frozen=True)
class Trained:
    """losses: of each step, before it. logprobs: of the samples, after the last step. weights: this stage's, by
    Hugging Face name."""

    losses: list[float]
    logprobs: list[Tensor]
    weights: dict[str, Tensor]


def train_and_export(folder: Path, out: Path, samples: Sequence[Sample], steps: int, parallel: dict) -> Trained:
    """A few optimizer steps in fp32 on the same samples, then `export_hf` to `out`."""
    engine = make_engine(folder, "fp32", **parallel)
    losses = []
    for _ in range(steps):
        losses.append(engine.forward_backward(samples, TOKEN_MEAN).loss)
        assert engine.optim_step().applied
    engine.export_hf(out)
    return Trained(losses, engine.logprobs(samples), weights_by_hf_name(engine))
