"""Estimate the device memory of a training step: what a search over layouts ranks by, and what a start checks.

One layer of each kind, the embedding and the loss head are counted once a setting (`isoloss.engine.memory.counting`);
here they are added up for the layers of a stage. `isoloss.tools.plan` counts a whole rank in a dry run; the two are
compared in tests/numerics/test_memory_estimate.py.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import accumulate, pairwise
from math import lcm

import torch

from isoloss.engine.config.schema import Config
from isoloss.engine.memory.counting import Counted, Layers, Setting, head_of, layers_of
from isoloss.models.architecture import Architecture
from isoloss.models.kinds.layer import Layer
from isoloss.models.kinds.mappings import ParamMapping
from isoloss.models.mcore.activation_memory import ActivationMemory
from isoloss.models.mcore.stages import stage_layers
from isoloss.models.weights.weight_map import weight_map
from isoloss.parallel import Layout

EMBEDDING = "embedding"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
FEW, MANY = 1024, 2048  # tokens of a rank for which layers are counted
PARTS_OF_EXPERTS = 8  # most parts of the experts where attention is counted, which does not depend on them


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a rank of a pipeline stage. activations: all that a step adds, where it adds most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def peak(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


def step_memory(config: Config, arch: Architecture, layout: Layout) -> list[StageMemory]:
    """Return the memory of every pipeline rank, for full rows (batch.max_tokens) whose tokens all are targets."""
    held = resident_memory(config, arch, layout)
    parts, chunks = _parts_of(config, arch, layout), _chunks(config, arch, layout)
    return [
        replace(stage, activations=_activations(config, arch, layout, parts, rank, chunks[rank]))
        for rank, stage in enumerate(held)
    ]


def resident_memory(config: Config, arch: Architecture, layout: Layout) -> list[StageMemory]:
    """Return what every pipeline rank has between steps, without activations."""
    width = DTYPES[config.train.precision].itemsize
    master = 8 if width == 8 else 4  # bytes of a main weight and of a moment
    replicas = (layout.dp * layout.context, layout.world_size // layout.pp // (layout.ep * layout.etp))
    if not config.distributed_optimizer:
        replicas = (1, 1)
    trained, models = config.trained_models, config.trained_models + config.frozen_models
    state = trained * (3 if width == 2 else 2) * master * (1 - config.memory.offload_optimizer)
    stages = []
    for rank, chunks in enumerate(_chunks(config, arch, layout)):
        dense, experts = parameters(arch, layout, rank, chunks)
        optimizer = sum(state * part / ranks for part, ranks in zip((dense, experts), replicas))
        gradients = trained * _gradient_dtype(config).itemsize * (dense + experts)
        stages.append(StageMemory(models * width * (dense + experts), gradients, optimizer, 0.0))
    return stages


def _chunks(config: Config, arch: Architecture, layout: Layout) -> list[list[range]]:
    """Return the layers of the chunks of every pipeline rank."""
    ends = [0, *accumulate(stage_layers(arch, layout, config.parallel.stage_layers))]
    stages = [range(start, end) for start, end in pairwise(ends)]
    return [stages[rank :: layout.pp] for rank in range(layout.pp)]


def _gradient_dtype(config: Config) -> torch.dtype:
    if config.parallel.grad_reduce_dtype == "bf16":
        return torch.bfloat16
    return torch.float64 if config.train.precision == "fp64" else torch.float32


# ---- weights ---------------------------------------------------------------------------------------------------------


def parameters(arch: Architecture, layout: Layout, rank: int, chunks: Sequence[range]) -> tuple[int, int]:
    """Parameters of a rank that every data-parallel rank has, and those of its experts."""
    dense, experts = _by_layer(arch, layout.tp, layout.ep, layout.etp)
    layers = [layer for chunk in chunks for layer in chunk]
    first, last = rank == 0, rank == layout.pp - 1
    ends = dense[EMBEDDING] * (first or (last and arch.tie_embeddings)) + dense[None] * last
    return ends + sum(dense[layer] for layer in layers), sum(experts[layer] for layer in layers)


@cache
def _by_layer(arch: Architecture, tp: int, ep: int, etp: int) -> tuple[Counter, Counter]:
    """Parameters of a rank, by layer; those behind the last layer under None. The second of experts."""
    dense, experts = Counter(), Counter()
    for weight in weight_map(arch):
        if weight.expert is None:
            place = EMBEDDING if weight.name.startswith(EMBEDDING) else weight.layer
            dense[place] += _shard(weight.mapping, weight.shape, tp)
        elif arch.experts is not None and weight.expert < arch.experts.count // ep:
            experts[weight.layer] += _shard(weight.mapping, weight.shape, etp)
    return dense, experts


@cache
def _shard(mapping: ParamMapping, shape: tuple[int, ...], size: int) -> int:
    return mapping.shard(torch.empty(shape, device="meta"), size, 0).numel()


# ---- activations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Bytes that a part of a chunk keeps until its backward, and the most that it adds in forward and backward."""

    kept: float
    peak: float


@dataclass(frozen=True)
class _Parts:
    """The parts of a model on a rank, for some number of tokens. layers: attention and MLP of each kind of layer.

    row: bytes of the hidden states of a row: stages send them, and a layer that is computed again keeps no others.
    buffer: bytes of the buffer for rows that are gathered.
    """

    embedding: _Part
    layers: Mapping[Layer, Sequence[_Part]]
    head: _Part
    row: int
    buffer: int


def kept_by_layers(config: Config, arch: Architecture, layout: Layout, layers: range) -> float:
    """Return the bytes that consecutive layers, and their input, keep of a micro-batch until its backward."""
    parts = _parts_of(config, arch, layout)
    return parts.row + sum(part.kept for part in _of_layers(config, arch, parts, layers))


def _activations(
    config: Config, arch: Architecture, layout: Layout, parts: _Parts, rank: int, chunks: Sequence[range]
) -> float:
    first, last = rank == 0, rank == layout.pp - 1
    received = parts.embedding.kept  # from the stage before, in place of the embedding's output
    kept, added = [], []
    for chunk, layers in enumerate(chunks):
        begin = parts.embedding if first and chunk == 0 else _Part(received, received)
        sequence = [begin, *_of_layers(config, arch, parts, layers)]
        if last and chunk == layout.vpp - 1:
            if first:  # autograd keeps the head's part of the gradient of a tied embedding until it has the other
                sequence = [replace(part, peak=part.peak + parts.head.kept) for part in sequence]
            sequence.append(replace(parts.head, kept=0))
        else:
            sequence = _with_held_output(sequence, parts.row)
        kept.append(sum(part.kept for part in sequence))
        added.append(_most(sequence) - kept[-1])
    sent = 0 if first else parts.row  # the schedule holds the gradient that it sent last
    return parts.buffer + sent + max(held + added[chunk] for chunk, held in _held_before_backwards(layout, rank, kept))


def _of_layers(config: Config, arch: Architecture, parts: _Parts, layers: range) -> Iterator[_Part]:
    memory = config.memory
    again = (
        0 if memory.recompute != "full" else len(layers) if memory.recompute_layers is None else memory.recompute_layers
    )
    for place, layer in enumerate(layers):
        halves = parts.layers[arch.layers[layer]]
        if place < again:
            halves = [_Part(parts.row, _most(_with_held_output(halves, parts.row)))]
        yield from halves


def _with_held_output(parts: Sequence[_Part], row: int) -> Sequence[_Part]:
    """Return parts whose backward is called with their output and its gradient, and so holds these to its end: by the
    schedule of a pipeline, or where a layer is computed again. The last part has the gradient in any case."""
    *others, last = parts
    return [*(replace(part, peak=part.peak + 2 * row) for part in others), replace(last, peak=last.peak + row)]


def _most(parts: Sequence[_Part]) -> float:
    """Return the most bytes that parts add which follow each other."""
    before = accumulate((part.kept for part in parts), initial=0.0)
    return max(kept + part.peak for kept, part in zip(before, parts))


def _held_before_backwards(layout: Layout, rank: int, kept: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Yield the chunk of every backward, and the bytes kept by all forwards before it whose backward is still to come:
    1F1B, or interleaved, where `pp` micro-batches go through a chunk before the next one (arXiv:2104.04473).

    kept: bytes that each chunk keeps of a micro-batch.
    """
    ahead = layout.pp - rank - 1
    if layout.vpp > 1:
        ahead = 2 * ahead + (layout.vpp - 1) * layout.pp
    forward = [chunk for chunk in range(layout.vpp) for _ in range(layout.pp)] * 3  # more says nothing new
    backward = [layout.vpp - 1 - chunk for chunk in forward]
    held = sum(kept[chunk] for chunk in forward[:ahead])
    for started, ended in zip(forward[ahead:], backward):
        held += kept[started]
        yield ended, held
        held -= kept[ended]


# ---- what is counted -------------------------------------------------------------------------------------------------


def _parts_of(config: Config, arch: Architecture, layout: Layout) -> _Parts:
    """Count, or look up, the parts of a model in this layout with these settings."""
    memory = ActivationMemory(**{field.name: getattr(config.memory, field.name) for field in fields(ActivationMemory)})
    if memory.recompute == "full":  # which `_of_layers` makes of layers that keep all
        memory = replace(memory, recompute="none", recompute_layers=None)
    setting = Setting(
        _one_layer_each(arch, tied=arch.tie_embeddings and layout.pp == 1),
        _model_only(layout),
        memory,
        config.kernels,
        DTYPES[config.train.precision],
        _gradient_dtype(config),
        config.accumulates_in_products(on_gpu=True),
        config.moe.dispatch_bound,
    )
    return _parts(setting, config.batch.max_tokens // layout.context)


@cache
def _one_layer_each(arch: Architecture, tied: bool) -> Architecture:
    """Return a model that has one layer of each kind of this one."""
    return replace(arch, layers=tuple(dict.fromkeys(arch.layers)), tie_embeddings=tied)


@cache
def _parts(setting: Setting, tokens: int) -> _Parts:
    arch, layout = setting.arch, setting.layout
    # Attention is alike in all divisions of experts, and the MLP in all divisions of the context.
    experts = arch.experts
    ep = max(n for n in range(1, PARTS_OF_EXPERTS + 1) if experts.count % n == 0) if experts else 1
    few, many = _counts(setting, replace(layout, ep=ep, etp=1))
    mlp_few, mlp_many = _counts(setting, replace(layout, ulysses=1, ring=1))
    head = head_of(replace(setting, layout=_model_only(replace(layout, ulysses=1, ring=1, ep=ep, etp=1))), tokens)
    layers = {
        layer: (
            _at(tokens, few.layers[kind].attention, many.layers[kind].attention),
            _at(tokens, mlp_few.layers[kind].mlp, mlp_many.layers[kind].mlp),
        )
        for kind, layer in enumerate(arch.layers)
    }
    embedding = _at(tokens, mlp_few.embedding, mlp_many.embedding)
    whole_row = setting.dtype.itemsize * tokens * arch.hidden_size
    if not layout.sequence_parallel:
        return _Parts(embedding, layers, _Part(head.kept, head.levels.max()), whole_row, 0)
    return _Parts(embedding, layers, _Part(head.kept, head.levels.max()), whole_row // layout.tp, whole_row)


def _counts(setting: Setting, layout: Layout) -> list[Layers]:
    return layers_of(replace(setting, layout=_model_only(layout)), (FEW, MANY))


def _model_only(layout: Layout) -> Layout:
    """Return the layout of the fewest ranks, with one stage, that divides layers like this one."""
    ranks = lcm(layout.tp * layout.context, layout.ep * layout.etp)
    return replace(layout, pp=1, vpp=1, dp=ranks // (layout.tp * layout.context))


def _at(tokens: int, few: Counted, many: Counted) -> _Part:
    """Return a part at another number of tokens. Every level of memory is affine in it. Where the two have other ops,
    because loops over tokens are longer, the highest level is taken for affine."""
    share = (tokens - FEW) / (MANY - FEW)
    if len(few.levels) == len(many.levels):
        peak = (few.levels + share * (many.levels - few.levels)).max()
    else:
        peak = few.levels.max() + share * (many.levels.max() - few.levels.max())
    return _Part(few.kept + share * (many.kept - few.kept), float(peak))
