"""Estimate the device memory of a training step: what a search over layouts ranks by, and what a start checks.

One layer of each kind, the embedding and the loss head are counted once a setting (`isoloss.engine.memory.counting`);
here they are added up for the layers of a stage. `isoloss.tools.plan` counts a whole rank in a dry run; the two are
compared in tests/numerics/test_memory_estimate.py.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import accumulate, pairwise
from math import lcm

import numpy as np
import torch

from isoloss.engine.batching.balance import FULL
from isoloss.engine.config.schema import Config, MemoryConfig
from isoloss.engine.memory.counting import Counted, Layers, Setting, head_of, layers_of
from isoloss.models.architecture import Architecture
from isoloss.models.kinds.mappings import ParamMapping
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import trained_weights
from isoloss.models.mcore.activation_memory import KEEP_ALL, ActivationMemory
from isoloss.models.mcore.stages import stage_layers
from isoloss.parallel import Layout

EMBEDDING = "embedding"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
FEW, MANY = 1024, 2048  # tokens of a rank for which layers are counted
OF_MLP = ("mlp", "mlp_act", "moe", "experts", "shared_experts")  # modules whose recomputation attention does not see
LONG = 65536  # tokens of a rank up to which the loss head is counted
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
    parts, chunks = _parts_of(config, arch, layout), _chunks(arch, layout, config.parallel.stage_layers)
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
    for rank, chunks in enumerate(_chunks(arch, layout, config.parallel.stage_layers)):
        numbers = sum(parameters(arch, layout, rank, chunks))
        weights = models * width * numbers
        of_step = parameters(arch, layout, rank, chunks, config.lora)
        if config.lora.rank > 0:  # a frozen model of the same weights, such as a reference, is another adapter
            weights = width * (trained * numbers + models * sum(of_step))
        optimizer = sum(state * part / ranks for part, ranks in zip(of_step, replicas))
        gradients = trained * _gradient_dtype(config).itemsize * sum(of_step)
        stages.append(StageMemory(weights, gradients, optimizer, 0.0))
    return stages


@cache
def _chunks(arch: Architecture, layout: Layout, stage_sizes: Sequence[int]) -> list[tuple[range, ...]]:
    """Return the layers of the chunks of every pipeline rank."""
    ends = [0, *accumulate(stage_layers(arch, layout, stage_sizes))]
    stages = tuple(range(start, end) for start, end in pairwise(ends))
    return [stages[rank :: layout.pp] for rank in range(layout.pp)]


def _gradient_dtype(config: Config) -> torch.dtype:
    if config.parallel.grad_reduce_dtype == "bf16":
        return torch.bfloat16
    return torch.float64 if config.train.precision == "fp64" else torch.float32


# ---- weights ---------------------------------------------------------------------------------------------------------


@cache
def parameters(
    arch: Architecture, layout: Layout, rank: int, chunks: Sequence[range], lora: LoraConfig = FULL
) -> tuple[int, int]:
    """Return the numbers of a rank's parameters that every data-parallel rank has, and of those of its experts.

    lora: with a rank above 0, the factors are counted, and not the model's parameters.
    """
    kinds = _kinds(arch)
    dense, experts = _by_kind(kinds.one_each, layout.tp, layout.ep, layout.etp, lora)
    counts = Counter(kind for chunk in chunks for kind in kinds.kinds_L[chunk.start : chunk.stop].tolist())
    first, last = rank == 0, rank == layout.pp - 1
    ends = dense[EMBEDDING] * (first or (last and arch.tie_embeddings)) + dense[None] * last
    return ends + sum(dense[kind] * n for kind, n in counts.items()), sum(
        experts[kind] * n for kind, n in counts.items()
    )


@cache
def _by_kind(one_each: Architecture, tp: int, ep: int, etp: int, lora: LoraConfig) -> tuple[Counter, Counter]:
    """Return the parameters of a rank by kind of layer, those behind the last layer under None; and its experts'."""
    dense, experts = Counter(), Counter()
    for weight in trained_weights(one_each, lora):
        if weight.expert is None:
            place = EMBEDDING if weight.name.startswith(EMBEDDING) else weight.layer
            dense[place] += _shard(weight.mapping, weight.shape, tp)
        elif one_each.experts is not None and weight.expert < one_each.experts.count // ep:
            experts[weight.layer] += _shard(weight.mapping, weight.shape, etp)
    return dense, experts


@cache
def _shard(mapping: ParamMapping, shape: tuple[int, ...], size: int) -> int:
    return mapping.shard(torch.empty(shape, device="meta"), size, 0).numel()


# ---- activations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Bytes that a part of a model keeps until its backward, and the most that it adds in forward and backward."""

    kept: float
    peak: float


@dataclass(frozen=True)
class _Parts:
    """The parts of a model on a rank, for some number of tokens. Suffix K: one for each kind of layer.

    kept_K, peak_K: bytes of a layer, as of a `_Part`.
    held_K: the same peak where the caller of the backward holds the layer's output and its gradient to the end: the
        schedule of a pipeline, or the function that computes the layer again. The MLP has the gradient in any case.
    row: bytes of the hidden states of a row: stages send them, and a layer that is computed again keeps no others.
    buffer: bytes of the buffer for rows that are gathered.
    """

    embedding: _Part
    kept_K: np.ndarray
    peak_K: np.ndarray
    held_K: np.ndarray
    head: _Part
    row: int
    buffer: int

    def of_layers(self, kinds: np.ndarray, again: int) -> tuple[np.ndarray, np.ndarray]:
        """Return kept and peak of consecutive layers, the first `again` of which are computed again."""
        kept, peak = self.kept_K[kinds], self.peak_K[kinds]
        kept[:again], peak[:again] = self.row, self.held_K[kinds[:again]]
        return kept, peak


def kept_by_layers(config: Config, arch: Architecture, layout: Layout, layers: range) -> float:
    """Return the bytes that consecutive layers, and their input, keep of a micro-batch until its backward."""
    parts, kinds = _parts_of(config, arch, layout), _kinds(arch).kinds_L[layers.start : layers.stop]
    return parts.row + float(parts.of_layers(kinds, _computed_again(config, layers))[0].sum())


def _computed_again(config: Config, layers: range) -> int:
    if config.memory.recompute != "full":
        return 0
    return len(layers) if config.memory.recompute_layers is None else min(config.memory.recompute_layers, len(layers))


def _activations(
    config: Config, arch: Architecture, layout: Layout, parts: _Parts, rank: int, chunks: Sequence[range]
) -> float:
    first, last = rank == 0, rank == layout.pp - 1
    kinds_L = _kinds(arch).kinds_L
    received = parts.embedding.kept  # from the stage before, in place of the embedding's output
    kept, added = [], []
    for chunk, layers in enumerate(chunks):
        kinds, again = kinds_L[layers.start : layers.stop], _computed_again(config, layers)
        begin = parts.embedding if first and chunk == 0 else _Part(received, received)
        kept_L, peak_L = parts.of_layers(kinds, again)
        ends = last and chunk == layout.vpp - 1
        if not ends:  # all parts hold the output of the chunk and its gradient, which the last layer has in any case
            peak_L += 2 * parts.row
            peak_L[-1] = parts.held_K[kinds[-1]] + (parts.row if again == len(layers) else 0)
        whole = begin.kept + float(kept_L.sum())
        most = max(
            begin.peak + (0 if ends else 2 * parts.row), begin.kept + float((kept_L.cumsum() - kept_L + peak_L).max())
        )
        if ends:  # autograd keeps the head's part of the gradient of a tied embedding until it has the other
            most = max(most + parts.head.kept, whole + parts.head.peak)
        kept.append(whole)
        added.append(most - whole)
    sent = 0 if first else parts.row  # the schedule holds the gradient that it sent last
    return parts.buffer + sent + max(held + added[chunk] for chunk, held in _held_before_backwards(layout, rank, kept))


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
    one_each = _kinds(arch).one_each
    setting = Setting(
        one_each if layout.pp == 1 or not arch.tie_embeddings else replace(one_each, tie_embeddings=False),
        _model_only(layout),
        _kept_or_modules(config.memory),
        config.kernels,
        DTYPES[config.train.precision],
        _gradient_dtype(config),
        config.accumulates_in_products(on_gpu=True),
        config.moe.dispatch_bound,
        config.lora,
    )
    return _parts(setting, config.batch.max_tokens // layout.context)


@cache
def _kept_or_modules(memory: MemoryConfig) -> ActivationMemory:
    """Return the settings of a layer that is not computed again as a whole."""
    values = {field.name: getattr(memory, field.name) for field in fields(ActivationMemory)}
    if memory.recompute == "full":
        values |= {"recompute": "none", "recompute_layers": None}
    return ActivationMemory(**values)


@dataclass(frozen=True)
class _Kinds:
    """The kinds of layers of a model. Suffixes: L layers, K kinds.

    one_each: a model with one layer of each kind.
    kinds_L: kind of each layer of the model.
    attentions, mlps: models with the fewest layers that have every attention, or every MLP, with what is around it.
    attention_K, mlp_K: for each kind, the layer of these models that has its attention, or MLP.
    """

    one_each: Architecture
    kinds_L: np.ndarray
    attentions: Architecture
    attention_K: Sequence[int]
    mlps: Architecture
    mlp_K: Sequence[int]


@cache
def _kinds(arch: Architecture) -> _Kinds:
    layers = tuple(dict.fromkeys(arch.layers))
    by_attention = {replace(layer, mlp=layers[0].mlp): layer for layer in reversed(layers)}
    by_mlp = {replace(layer, attention=layers[0].attention): layer for layer in layers}
    attentions, mlps = list(by_attention), list(by_mlp)
    return _Kinds(
        replace(arch, layers=layers),
        np.array([layers.index(layer) for layer in arch.layers]),
        replace(arch, layers=tuple(by_attention.values())),
        [attentions.index(replace(layer, mlp=layers[0].mlp)) for layer in layers],
        replace(arch, layers=tuple(by_mlp.values())),
        [mlps.index(replace(layer, attention=layers[0].attention)) for layer in layers],
    )


@cache
def _parts(setting: Setting, tokens: int) -> _Parts:
    arch, layout, kinds = setting.arch, setting.layout, _kinds(setting.arch)
    # Attention is alike in all divisions of experts, and the MLP in all divisions of the context.
    experts = arch.experts
    ep = max(n for n in range(1, PARTS_OF_EXPERTS + 1) if experts.count % n == 0) if experts else 1
    memory = setting.memory
    if memory.recompute == "selective" and memory.recompute_modules:
        modules = tuple(name for name in memory.recompute_modules if name not in OF_MLP)
        memory = replace(memory, recompute="selective" if modules else "none", recompute_modules=modules)
    of_attention = replace(setting, arch=kinds.attentions, memory=memory)
    few, many = _counts(of_attention, replace(layout, ep=ep, etp=1))
    mlp_few, mlp_many = _counts(replace(setting, arch=kinds.mlps), replace(layout, ulysses=1, ring=1))
    of_head = replace(setting, memory=KEEP_ALL, layout=_model_only(replace(layout, ulysses=1, ring=1, ep=ep, etp=1)))
    head = _head(of_head, tokens)
    attention_K = [_at(tokens, few.layers[n].attention, many.layers[n].attention) for n in kinds.attention_K]
    mlp_K = [_at(tokens, mlp_few.layers[n].mlp, mlp_many.layers[n].mlp) for n in kinds.mlp_K]
    gathered = setting.dtype.itemsize * tokens * arch.hidden_size
    row = gathered // layout.tp if layout.sequence_parallel else gathered
    both_K = list(zip(attention_K, mlp_K))
    return _Parts(
        _at(tokens, mlp_few.embedding, mlp_many.embedding),
        np.array([a.kept + m.kept for a, m in both_K]),
        np.array([max(a.peak, a.kept + m.peak) for a, m in both_K]),
        np.array([max(a.peak + 2 * row, a.kept + m.peak + row) for a, m in both_K]),
        head,
        row,
        # Frozen layers, adapted or not, gather into memory of their own.
        gathered if layout.sequence_parallel and setting.lora.rank == 0 else 0,
    )


def _head(setting: Setting, tokens: int) -> _Part:
    """Return the loss head, whose logits exist in chunks: affine in the tokens from `LONG` on, and counted below."""
    if tokens <= LONG:
        head = head_of(setting, tokens)
        return _Part(head.kept, head.levels.max())
    half, whole = (_head(setting, number) for number in (LONG // 2, LONG))
    return _Part(whole.kept, whole.peak + (tokens - LONG) * (whole.peak - half.peak) / (LONG // 2))


def _counts(setting: Setting, layout: Layout) -> list[Layers]:
    return layers_of(replace(setting, layout=_model_only(layout)), (FEW, MANY))


@cache
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
