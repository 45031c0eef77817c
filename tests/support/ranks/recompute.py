"""What a step keeps for its backward, and computes again in it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_layer import TransformerLayer

from isoloss.engine.config.schema import (
    BatchConfig,
    Config,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from isoloss.tools.prove.parity import thaw

KEEP = MemoryConfig()


def fp64_config(folder: Path, memory: MemoryConfig = KEEP, **parallel: Any) -> Config:
    """Of several micro-batches."""
    return Config(
        ModelConfig(str(folder)),
        batch=BatchConfig(max_tokens=128),
        parallel=ParallelConfig(**parallel),
        memory=memory,
        train=TrainConfig(precision="fp64"),
    )


@dataclass(frozen=True)
class Kept:
    """nbytes: of memory that autograd holds when the first backward begins, parameters left out.
    forwards: of transformer layers in the step."""

    nbytes: int
    forwards: int


def kept(config: Config, frozen: bytes) -> Kept:
    """One step of this rank, whose pipeline is not interleaved."""
    engine, samples = Engine(config), thaw(frozen)
    weights = {parameter.untyped_storage()._cdata for parameter in engine.chunks[0].parameters()}
    storages, at_backward, forwards = {}, [], []

    def pack(tensor):
        if not at_backward:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    original = schedules.backward_step

    def backward_step(*args, **kwargs):
        at_backward.append(sum(storage.nbytes() for key, storage in storages.items() if key not in weights))
        return original(*args, **kwargs)

    for module in engine.chunks[0].modules():
        if isinstance(module, TransformerLayer):
            module.register_forward_hook(lambda *args: forwards.append(args))
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        mock.patch.object(schedules, "backward_step", backward_step),
    ):
        engine.forward_backward(samples, cross_entropy(LossConfig()))
    return Kept(at_backward[0], len(forwards))
