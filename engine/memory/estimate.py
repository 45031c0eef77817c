"""Estimate the device memory of a training step: what a search over layouts ranks by, and what a start checks.

One layer of each kind, the embedding and the loss head are counted once a setting (`isoloss.engine.memory.counting`);
here they are added up for the layers of a stage. `isoloss.tools.plan` counts a whole rank in a dry run; the two are
compared in tests/numerics/test_memory_estimate.py.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from math import lcm

import torch

from isoloss.engine.config.schema import Config
from isoloss.engine.memory.counting import Counted, Setting, counted
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
EP = 8  # most ranks that experts are divided over where only attention is wanted


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
    split = stage_layers(arch, layout, config.parallel.stage_layers)
    starts = [sum(split[:stage]) for stage in range(len(split))]
    stages = [range(start, start + count) for start, count in zip(starts, split)]
    return [
        _rank_memory(config, arch, layout, rank, [stages[chunk * layout.pp + rank] for chunk in range(layout.vpp)])
        for rank in range(layout.pp)
    ]


def _rank_memory(config: Config, arch: Architecture, layout: Layout, rank: int, chunks: Sequence[range]) -> StageMemory:
    width = DTYPES[config.train.precision].itemsize
    dense, experts = parameters(arch, layout, rank, chunks)
    master = 8 if width == 8 else 4  # bytes of a gradient (unless it is bf16), of a main weight and of a moment
    replicas = (layout.dp * layout.context, layout.world_size // layout.pp // (layout.ep * layout.etp))
    if not config.distributed_optimizer:
        replicas = (1, 1)
    trained, models = config.trained_models, config.trained_models + config.frozen_models
    state = trained * (3 if width == 2 else 2) * master * (1 - config.memory.offload_optimizer)
    return StageMemory(
        models * width * (dense + experts),
        trained * _gradient_dtype(config).itemsize * (dense + experts),
        sum(state * part / ranks for part, ranks in zip((dense, experts), replicas)),
        _activations(config, arch, layout, rank, chunks),
    )


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
    """Bytes that a part of a chunk keeps until its backward, and the most that it adds on the way there and back."""

    kept: float
    peak: float


@dataclass(frozen=True)
class _Parts:
    """The parts of a model on a rank, for some number of tokens. layers: attention and MLP of each kind of layer.

    row: bytes of the hidden states of a row, which stages send each other, and which is all that is kept of a layer
        that is computed again.
    buffer: bytes of the buffer for rows that are gathered.
    """

    embedding: _Part
    layers: Mapping[Layer, Sequence[_Part]]
    head: _Part
    row: int
    buffer: float

    def of_layer(self, layer: Layer, again: bool) -> Sequence[_Part]:
        if not again:
            return self.layers[layer]
        return (_Part(self.row, _most(_with_held_output(self.layers[layer], self.row))),)


def _with_held_output(parts: Sequence[_Part], row: int) -> Sequence[_Part]:
    """Return parts whose backward is called with their output and its gradient, and so holds these to its end: by the
    schedule of a pipeline, or where a layer is computed again. The last part has the gradient in any case."""
    *others, last = parts
    return [*(replace(part, peak=part.peak + 2 * row) for part in others), replace(last, peak=last.peak + row)]


def kept_by_layers(config: Config, arch: Architecture, layout: Layout, layers: range) -> float:
    """Return the bytes that consecutive layers, and their input, keep of a micro-batch until its backward."""
    parts = _parts_of(config, arch, layout)
    return parts.row + sum(part.kept for part in _of_layers(config, arch, parts, layers))


def _activations(config: Config, arch: Architecture, layout: Layout, rank: int, chunks: Sequence[range]) -> float:
    parts = _parts_of(config, arch, layout)
    first, last = rank == 0, rank == layout.pp - 1
    sequences = []
    for chunk, layers in enumerate(chunks):
        received = parts.embedding.kept  # from the stage before, in place of the embedding's output
        begin = parts.embedding if first and chunk == 0 else _Part(received, received)
        sequence = [begin, *_of_layers(config, arch, parts, layers)]
        if last and chunk == layout.vpp - 1:
            if first:  # autograd keeps the head's part in the gradient of a tied embedding
                sequence = [replace(part, peak=part.peak + parts.head.kept) for part in sequence]
            sequence.append(replace(parts.head, kept=0))
        else:
            sequence = _with_held_output(sequence, parts.row)
        sequences.append(sequence)
    kept = [sum(part.kept for part in sequence) for sequence in sequences]
    added = [_most(sequence) - nbytes for sequence, nbytes in zip(sequences, kept)]
    sent = 0 if first else parts.row  # the schedule holds the gradient that it sent last
    most = max(held + added[chunk] for chunk, held in _held_before_backwards(layout, rank, kept))
    return parts.buffer + sent + most


def _most(parts: Sequence[_Part]) -> float:
    """Return the most bytes that parts add which follow each other."""
    kept, most = 0.0, 0.0
    for part in parts:
        most = max(most, kept + part.peak)
        kept += part.kept
    return most


def _of_layers(config: Config, arch: Architecture, parts: _Parts, layers: range) -> Iterator[_Part]:
    again = 0
    if config.memory.recompute == "full":
        again = len(layers) if config.memory.recompute_layers is None else config.memory.recompute_layers
    for place, layer in enumerate(layers):
        yield from parts.of_layer(arch.layers[layer], place < again)


def _held_before_backwards(layout: Layout, rank: int, kept: Sequence[float]) -> Iterator[tuple[int, float]]:
    """The chunk of a backward, and what all forwards before it keep that have had none: 1F1B, or interleaved, where
    `pp` micro-batches go through a chunk before the next one has its turn (arXiv:2104.04473).

    kept: by each chunk of a micro-batch.
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


def _parts_of(config: Config, arch: Architecture, layout: Layout) -> _Parts:
    """Count, or look up, the parts of a model in this layout with these settings."""
    memory = ActivationMemory(**{field.name: getattr(config.memory, field.name) for field in fields(ActivationMemory)})
    if memory.recompute == "full":  # which `_Parts.layer` knows
        memory = replace(memory, recompute="none", recompute_layers=None)
    precision = DTYPES[config.train.precision]
    accumulates = config.accumulates_in_products(on_gpu=True)
    setting = Setting(
        one_layer_each(replace(arch, tie_embeddings=arch.tie_embeddings and layout.pp == 1)), _model_only(layout), memory, config.kernels, precision, _gradient_dtype(config), accumulates,
        config.moe.dispatch_bound,
    )  # fmt: skip
    return _parts(setting, config.batch.max_tokens // layout.context)


@cache
def _parts(setting: Setting, tokens: int) -> _Parts:
    arch, layout = setting.arch, setting.layout
    # Attention is alike in all divisions of experts, and the MLP in all divisions of the context.
    ep = max(ranks for ranks in range(1, EP + 1) if arch.experts is None or arch.experts.count % ranks == 0)
    few, many = (
        counted(
            replace(setting, layout=_model_only(replace(layout, ep=ep if arch.experts else 1, etp=1))), number, "layers"
        )
        for number in (FEW, MANY)
    )
    mlp_few, mlp_many = (
        counted(replace(setting, layout=_model_only(replace(layout, ulysses=1, ring=1))), number, "layers")
        for number in (FEW, MANY)
    )
    layers = {
        layer: (
            _at(tokens, few.layers[kind].attention, many.layers[kind].attention),
            _at(tokens, mlp_few.layers[kind].mlp, mlp_many.layers[kind].mlp),
        )
        for kind, layer in enumerate(arch.layers)
    }
    alone = replace(setting, layout=_model_only(replace(layout, ulysses=1, ring=1, ep=1, etp=1)))
    head = counted(alone, tokens, "head").head
    shards = layout.tp if layout.sequence_parallel else 1
    row = setting.dtype.itemsize * (tokens // shards) * arch.hidden_size
    return _Parts(
        _at(tokens, mlp_few.embedding, mlp_many.embedding), layers, _Part(head.kept, head.levels.max()), row,
        row * shards if layout.sequence_parallel else 0,
    )  # fmt: skip


def _model_only(layout: Layout) -> Layout:
    """Return the layout of the fewest ranks, with one stage, that divides layers like this one."""
    ranks = lcm(layout.tp * layout.context, layout.ep * layout.etp)
    return replace(layout, pp=1, vpp=1, dp=ranks // (layout.tp * layout.context))


def _at(tokens: int, few: Counted, many: Counted) -> _Part:
    """Return a part at another number of tokens. Every level of memory is affine in it. Where the two have other ops,
    because loops over tokens are longer, the highest is taken for affine."""
    share = (tokens - FEW) / (MANY - FEW)
    if len(few.levels) == len(many.levels):
        peak = (few.levels + share * (many.levels - few.levels)).max()
    else:
        peak = few.levels.max() + share * (many.levels.max() - few.levels.max())
    return _Part(few.kept + share * (many.kept - few.kept), peak)


def one_layer_each(arch: Architecture) -> Architecture:
    """Return a model that has one layer of each kind of this one."""
    return replace(arch, layers=tuple(dict.fromkeys(arch.layers)))
