"""A checkpoint with its log of what the trainer computed; runs on every rank."""

from collections.abc import Sequence
from pathlib import Path

import torch
from support.models.transformers_parity import TOKEN_MEAN, make_engine
from torch import Tensor

from isoloss.engine.batching.sample import Sample


def train_and_save(model: Path, out: Path, samples: Sequence[Sample], parallel: dict) -> Tensor:
    """Three optimizer steps and a checkpoint; the logits of the samples after them."""
    engine = make_engine(model, "fp32", **parallel)
    for _ in range(3):
        engine.train_step(samples, TOKEN_MEAN)
    engine.save(out)
    return torch.cat(engine.logits(samples))
