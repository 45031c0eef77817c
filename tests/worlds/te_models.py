"""A model on Transformer Engine's stand-in and on Megatron's local spec; runs on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from packaging.version import Version
from torch import Tensor

from isoloss.engine.batch import Sample
from isoloss.engine.config import BatchConfig, Config, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from isoloss.engine.engine import Engine
from isoloss.engine.optimizer import global_grad_norm
from isoloss.models import transformer_engine
from worlds.transformers_parity import TOKEN_MEAN


def make_engine(folder: Path, fused: bool, **parallel) -> Engine:
    """In fp32, with micro-batches of at most 128 tokens."""
    return Engine(
        Config(
            model=ModelConfig(path=str(folder), transformer_engine=fused),
            batch=BatchConfig(max_tokens=128),
            parallel=ParallelConfig(**{"distributed_optimizer": False, **parallel}),
            optim=OptimConfig(lr=1e-2, schedule="constant", weight_decay=0.1),
            train=TrainConfig(precision="fp32"),
        )
    )


@dataclass(frozen=True)
class Evaluated:
    """gradients: of this rank's share of the weights, by Megatron-Core name. arguments: those of the last call of
    Transformer Engine's attention in the first layer, where that is used."""

    logits: Tensor
    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    arguments: dict[str, object]


def evaluate(folder: Path, samples: Sequence[Sample], fused: bool, parallel: dict, version: str = "2.11") -> Evaluated:
    """A step. version: of Transformer Engine, as far as isoloss asks for it."""
    with mock.patch.object(transformer_engine, "installed", lambda: Version(version) if fused else None):
        engine = make_engine(folder, fused, **parallel)
    logits = torch.cat(engine.logits(samples))
    loss = engine.forward_backward(samples, TOKEN_MEAN).loss
    gradients = {name: gradient.clone() for name, gradient in engine.gradients()}
    engine.optimizer.prepare_grads()
    core = engine.chunks[0].module.decoder.layers[0].self_attention.core_attention
    return Evaluated(logits, loss, global_grad_norm(engine.optimizer), gradients, getattr(core, "received", {}))
