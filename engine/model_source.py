"""The model that a configuration names, read and checked once a run, before any process group exists."""

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from isoloss.engine import compatibility, device_memory
from isoloss.engine.config import Config
from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import hf_folder, read_architecture
from isoloss.models.mcore import nvidia_apex
from isoloss.models.weights.checkpoint_read import CheckpointWeights
from isoloss.models.weights.distcp import is_checkpoint
from isoloss.models.weights.hf_checkpoint import HFReader, WeightSource, check
from isoloss.models.weights.iterations import checkpoint_folder
from isoloss.models.weights.random_weights import RandomWeights
from isoloss.parallel import Layout, device, environment


@dataclass(frozen=True)
class ModelSource:
    """The model of a configuration, resolved and checked once a run.

    path: of the Hugging Face folder or the checkpoint, where model.path names a folder of checkpoints.
    layout: in this world.
    weights: where they are read from.
    folder: of config.json and tokenizer.
    """

    path: Path
    arch: Architecture
    layout: Layout
    weights: WeightSource
    folder: Path


def resolve(config: Config) -> ModelSource:
    """Read and check the model that a configuration names, and its layout.

    Raises UserError where they do not fit together. Enters no collective and needs no process group.
    """
    nvidia_apex.check()
    device.check(config.train.device)
    path, folder = checkpoint_folder(config.model.path), hf_folder(config.model.path)
    arch = read_architecture(folder)
    layout = config.parallel.layout().with_world(_world_size())
    compatibility.check(config, arch, layout)
    if config.memory.check and (memory := device.memory_bytes()) is not None:
        device_memory.check(config, arch, layout, memory)
    from_scratch = config.model.from_scratch
    weights = RandomWeights(arch, config.train.seed) if from_scratch else open_weights(path, arch)
    return ModelSource(path, arch, layout, weights, folder)


def open_weights(path: str | Path, arch: Architecture) -> WeightSource:
    """The weights of a Hugging Face folder or of a checkpoint. Raises UserError where they are not of this model."""
    if is_checkpoint(path):
        return CheckpointWeights(path, arch)
    source = HFReader(path)
    check(source, arch)
    return source


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else environment.rank_and_world()[1]
