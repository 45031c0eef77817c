"""Read and check the model that a configuration names, once a run, before any process group exists."""

import hashlib
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.engine.config import rules
from isoloss.engine.config.schema import Config
from isoloss.engine.memory import preflight
from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import hf_folder, read_architecture
from isoloss.models.kinds.weight import Weight
from isoloss.models.lora.initial import InitialFactors
from isoloss.models.lora.peft_source import initial_factors
from isoloss.models.weights.checkpoint_dirs import checkpoint_folder
from isoloss.models.weights.checkpoint_read import CheckpointWeights
from isoloss.models.weights.distcp import is_checkpoint
from isoloss.models.weights.hf_checkpoint import (
    INDEX,
    SINGLE,
    HFReader,
    WeightSource,
    check,
    has_weights,
)
from isoloss.models.weights.mmap import DTYPES
from isoloss.models.weights.random_weights import RandomWeights
from isoloss.models.weights.side_files import SideFiles
from isoloss.models.weights.weight_map import weight_map
from isoloss.parallel import Layout, UserError
from isoloss.parallel.collectives import gather_objects
from isoloss.parallel.runtime import device, environment
from isoloss.parallel.runtime.versions import check_apex


@dataclass(frozen=True)
class ModelSource:
    """The model of a configuration, resolved and checked once a run.

    path: the Hugging Face folder, or the checkpoint; if model.path is a folder of checkpoints, the chosen one.
    layout: the layout with its dp, in this world.
    weights: source of the weights.
    side_files: config.json, tokenizer and the like, of which checkpoints and exports hold copies.
    factors: source of the factors of an adapter, where lora.rank is above 0.
    own_dtypes: types of the tensors that are stored in another type than most of the model, such as a few in fp32
        among bf16, by their names in an exported folder.
    """

    path: Path
    arch: Architecture
    layout: Layout
    weights: WeightSource
    side_files: SideFiles
    own_dtypes: Mapping[str, torch.dtype]
    factors: WeightSource


def resolve(config: Config) -> ModelSource:
    """Read and check the model that a configuration names, and its layout.

    Raises UserError where they do not fit together. Enters no collective and needs no process group.
    """
    check_apex()
    device.check(config.train.device)
    path, folder = checkpoint_folder(config.model.path), hf_folder(config.model.path)
    arch = read_architecture(folder)
    side_files = SideFiles.of(folder)
    layout = config.parallel.layout().with_world(_world_size())
    rules.check(config, arch, layout)
    memory = device.memory_bytes() if config.memory.check else None
    # One rank a node: a rank that counts starts a process for that.
    if memory is not None and environment.local_rank() == 0:
        preflight.check(config, arch, layout, memory)
    from_scratch = config.model.from_scratch
    weights = RandomWeights(arch, config.train.seed) if from_scratch else open_weights(path, arch)
    return ModelSource(path, arch, layout, weights, side_files, _own_dtypes(weights, arch), factors_of(config, arch))


def digest(source: ModelSource) -> str:
    """Return a digest of the weights in model.path, as `digest_of`: the weights are read once more."""
    return digest_of(weight_map(source.arch), source.weights)


def digest_of(weights: Sequence[Weight], source: WeightSource) -> str:
    """Return a digest of weights, however their files divide them: of the CRC-32 of every tensor.

    The weights are read one at a time, and the ranks share the work. One all-gather over the world.
    """
    share = weights[dist.get_rank() :: dist.get_world_size()]
    mine = [(weight.name, _crc32(source.whole(weight))) for weight in share]
    checksums = sorted(chain.from_iterable(gather_objects(mine)))
    return hashlib.sha256(repr(checksums).encode()).hexdigest()[:16]


def _crc32(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def open_weights(path: str | Path, arch: Architecture) -> WeightSource:
    """Open the weights of a Hugging Face folder or a checkpoint. Raises UserError if they are not of this model."""
    if is_checkpoint(path):
        return CheckpointWeights(path, arch)
    if not has_weights(Path(path)):
        raise UserError(
            f"{path} has no {SINGLE} and no {INDEX}: give a folder with safetensors weights, or set "
            "model.from_scratch=true for random ones"
        )
    source = HFReader(path)
    check(source, arch)
    return source


def factors_of(config: Config, arch: Architecture) -> WeightSource:
    """Return the source of the factors that an adapter begins with."""
    if config.lora.init is not None:
        return initial_factors(config.lora.init, arch, config.lora)
    return InitialFactors(config.train.seed if config.lora.seed is None else config.lora.seed)


def _own_dtypes(weights: WeightSource, arch: Architecture) -> dict[str, torch.dtype]:
    """Return `ModelSource.own_dtypes`. "Most" are the most numbers, not the most tensors."""
    dtypes, numbers = dict[str, torch.dtype](), Counter[torch.dtype]()
    for stored, exported in zip(weight_map(arch), weight_map(arch.text_only()), strict=True):
        for part, name in zip(stored.parts, (part.tensor for part in exported.parts), strict=True):
            if isinstance(weights, CheckpointWeights):
                dtypes[name] = weights.dtype(stored)
            # A tensor may hold all experts of a layer: its file is asked once.
            elif name not in dtypes and isinstance(weights, HFReader):
                dtypes[name] = DTYPES[weights.dtype(part.tensor)]
            if name in dtypes:
                numbers[dtypes[name]] += prod(part.shape)
    usual = [dtype for dtype, _ in numbers.most_common(1)]
    return {name: dtype for name, dtype in dtypes.items() if dtype not in usual}


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else environment.rank_and_world()[1]
