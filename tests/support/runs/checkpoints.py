"""Training, saving and loading checkpoints in some layout; runs on every rank."""

from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.models.mcore.gpt import unwrap
from isoloss.parallel.runtime.errors import UserError
from support.models.transformers_parity import TOKEN_MEAN, make_engine


def train_and_save(model: Path, out: Path, samples: Sequence[Sample], parallel: dict) -> dict[str, Tensor]:
    """Two steps, a checkpoint, one more step; this rank's weights at the end."""
    engine = make_engine(model, "fp32", **parallel)
    for _ in range(2):
        engine.train_step(samples, TOKEN_MEAN)
    engine.save(out)
    engine.train_step(samples, TOKEN_MEAN)
    return {name: weight.clone() for name, weight in engine.weights()}


def load_and_train(model: Path, checkpoint: Path, samples: Sequence[Sample], parallel: dict) -> dict[str, Tensor]:
    """The checkpoint, then one step."""
    engine = make_engine(model, "fp32", **parallel)
    engine.load(checkpoint)
    engine.train_step(samples, TOKEN_MEAN)
    return {name: weight.clone() for name, weight in engine.weights()}


def refusal(model: Path, parallel: dict) -> str:
    """What this rank says of weights that cannot be loaded."""
    try:
        make_engine(model, "fp32", **parallel)
    except UserError as error:
        return str(error)
    return ""


def logits(model: Path, samples: Sequence[Sample], parallel: dict, checkpoint: Path | None = None) -> Tensor:
    """Of the model, or of the checkpoint of it."""
    engine = make_engine(model, "fp32", **parallel)
    if checkpoint is not None:
        engine.load(checkpoint)
    return torch.cat(engine.logits(samples)).cpu()


def logits_after_plain_load(model: Path, checkpoint: Path, samples: Sequence[Sample], parallel: dict) -> Tensor:
    """Of a model with random weights that Megatron-Core's own loader then filled from the checkpoint."""
    engine = make_engine(model, "fp32", from_scratch=True, **parallel)
    metadata = {"dp_cp_group": engine.mesh.dp_context}
    wanted = {
        str(index): unwrap(chunk).sharded_state_dict(metadata=metadata) for index, chunk in enumerate(engine.chunks)
    }
    state = dist_checkpointing.load(wanted, str(checkpoint))
    for index, chunk in enumerate(engine.chunks):
        unwrap(chunk).load_state_dict(state[str(index)])
    return torch.cat(engine.logits(samples))
