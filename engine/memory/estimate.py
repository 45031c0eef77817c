"""Device memory of a training step by arithmetic, in microseconds: what a search over layouts ranks by.

It knows the local layers of Megatron-Core and the kernels that torch chooses on CUDA. `isoloss.tools.plan` counts the
same in a dry run; the two are compared in tests/numerics/test_memory_estimate.py.

Letters: t tokens of a micro-batch on a rank, s of them between matrices (fewer under sequence parallelism), h hidden
size, f width of the MLP of a rank.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from isoloss.engine.config.schema import Config
from isoloss.engine.memory.attention import backward_by_blocks, is_by_blocks, kept_by_attention
from isoloss.engine.memory.delta import DeltaMemory, delta_memory
from isoloss.models.architecture import Architecture
from isoloss.models.kinds.dense import Dense
from isoloss.models.kinds.gated_delta import GatedDelta
from isoloss.models.kinds.kind import SoftmaxAttention
from isoloss.models.kinds.mappings import ParamMapping
from isoloss.models.mcore.stages import stage_layers
from isoloss.models.weights.weight_map import weight_map
from isoloss.parallel import Layout
from isoloss.parallel.loss_head import FUSED_CHUNK_ELEMENTS

EMBEDDING = "embedding"
BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


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
    width = BYTES[config.train.precision]
    dense, experts = parameters(arch, layout, rank, chunks)
    master = 8 if width == 8 else 4  # bytes of a gradient (unless it is bf16), of a main weight and of a moment
    replicas = (layout.dp * layout.context, layout.world_size // layout.pp // (layout.ep * layout.etp))
    if not config.distributed_optimizer:
        replicas = (1, 1)
    trained, models = config.trained_models, config.trained_models + config.frozen_models
    state = trained * (3 if width == 2 else 2) * master * (1 - config.memory.offload_optimizer)
    return StageMemory(
        models * width * (dense + experts),
        trained * (2 if config.parallel.grad_reduce_dtype == "bf16" else master) * (dense + experts),
        sum(state * part / ranks for part, ranks in zip((dense, experts), replicas)),
        _activations(config, arch, layout, rank, chunks),
    )


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
class _Sizes:
    """See the module. received: rows of tokens that a rank's experts get, with free places. delta: of a layer of Gated
    DeltaNet, where there are any."""

    t: int
    s: int
    h: int
    f: int
    width: int
    sequence_parallel: bool
    grouped: bool
    received: float
    delta: DeltaMemory | None


def kept_by_layers(config: Config, arch: Architecture, layout: Layout, layers: range) -> float:
    """Bytes that consecutive layers keep of a micro-batch until its backward."""
    return _chunk(config, arch, layout, layers, _sizes(config, arch, layout))


def _sizes(config: Config, arch: Architecture, layout: Layout) -> _Sizes:
    tokens, width = config.batch.max_tokens // layout.context, BYTES[config.train.precision]
    return _Sizes(
        tokens, tokens // (layout.tp if layout.sequence_parallel else 1), arch.hidden_size,
        max((mlp.width for mlp in arch.mlps if isinstance(mlp, Dense)), default=0) // layout.tp, width,
        layout.sequence_parallel, _grouped(config, arch), _received(config, arch, layout),
        next(
            (delta_memory(kind, layout, tokens, width) for kind in arch.attentions if isinstance(kind, GatedDelta)),
            None,
        ),
    )  # fmt: skip


def _received(config: Config, arch: Architecture, layout: Layout) -> float:
    if arch.experts is None:
        return 0
    tokens = config.batch.max_tokens // layout.context // (layout.tp if layout.sequence_parallel else 1)
    most = layout.ep * min(1, arch.experts.count / layout.ep / arch.experts.top_k)
    return tokens * arch.experts.top_k * layout.etp * min(config.moe.dispatch_bound or 1, most)


def _activations(config: Config, arch: Architecture, layout: Layout, rank: int, chunks: Sequence[range]) -> float:
    z = _sizes(config, arch, layout)
    kept = [_chunk(config, arch, layout, chunk, z) for chunk in chunks]
    gathered = z.width * z.t * z.h * z.sequence_parallel  # the buffer that rows are gathered in
    moments = []
    for chunk, held in _held_before_backwards(layout, rank, kept):
        moments.append(held + gathered + _backward(config, arch, layout, chunks[chunk][-1], z))
        moments.append(held + gathered + _delta_backward(config, arch, layout, chunks[chunk], z))
        moments.append(held + gathered + _block_backward(config, arch, layout, chunks[chunk], z))
        if rank == layout.pp - 1 and chunk == layout.vpp - 1:
            moments.append(held + gathered + _head(config, arch, layout, z))
    return max(moments)


def _held_before_backwards(layout: Layout, rank: int, kept: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Yield for each backward its chunk, and the bytes that forwards without a backward keep until then: 1F1B, or
    interleaved, where `pp` micro-batches go through a chunk before the next one has its turn (arXiv:2104.04473).

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


def _chunk(config: Config, arch: Architecture, layout: Layout, layers: range, z: _Sizes) -> float:
    """Return the bytes that the layers of a chunk keep of a micro-batch until its backward, and the chunk's input."""
    return z.width * z.s * z.h + sum(_by_layers(config, arch, layout, layers, z))


def _by_layers(config: Config, arch: Architecture, layout: Layout, layers: range, z: _Sizes) -> list[float]:
    recomputed, count = 0, config.memory.recompute_layers
    if config.memory.recompute == "full":
        recomputed = len(layers) if count is None else min(count, len(layers))
    modules = _recomputed_modules(config)
    whole = [z.width * z.s * z.h] * recomputed
    return whole + [_layer(arch, layout, n, modules, z) for n in layers[recomputed:]]


def _recomputed_modules(config: Config) -> tuple[str, ...]:
    return (config.memory.recompute_modules or ("core_attn",)) if config.memory.recompute == "selective" else ()


def _layer(arch: Architecture, layout: Layout, layer: int, modules: Sequence[str], z: _Sizes) -> float:
    """Return the bytes that a layer keeps of a micro-batch: attention or Gated DeltaNet; two sums of the residual
    stream, two norms, and the inputs of the norms behind attention and MLP; the MLP."""
    attention = arch.layers[layer].attention
    if z.delta is not None and not isinstance(attention, SoftmaxAttention):
        kept = z.delta.kept_without_core if "core_attn" in modules else z.delta.kept
    else:
        assert isinstance(attention, SoftmaxAttention)
        kept = kept_by_attention(attention, layout, modules, z.t, z.width)
    norms = (0 if "layernorm" in modules else 1) + 2 + 2 * arch.layers[layer].sandwich
    kept += z.width * z.s * z.h * norms
    return kept + (_experts(arch, layout, modules, z) if arch.sparse[layer] else _mlp(modules, z))


def _grouped(config: Config, arch: Architecture) -> bool:
    """Return whether all experts of a rank are run at once."""
    plain = all(mlp.activation != "clamped_swiglu" for mlp in arch.mlps) and not config.model.transformer_engine
    return config.kernels.grouped_experts and config.train.precision == "bf16" and plain


def _mlp(modules: Sequence[str], z: _Sizes) -> float:
    """Return the bytes kept: the norm's output; gate and up; their product."""
    kept = 0 if "layernorm" in modules else z.width * z.s * z.h
    inside = 0 if "mlp" in modules else 2 if "mlp_act" in modules else 3
    return kept + z.width * z.t * inside * z.f


def _experts(arch: Architecture, layout: Layout, modules: Sequence[str], z: _Sizes) -> float:
    """Return the bytes kept: the router's input, in fp32; the tensors of shared experts, and their output before its
    gate; tokens by expert; gate and up; and where experts run one by one, their product, also weighted."""
    experts = arch.experts
    assert experts is not None
    if "moe" in modules:
        return 0 if "layernorm" in modules else z.width * z.s * z.h
    inner = experts.intermediate_size // layout.etp
    router = 4 * z.s * (z.h + 3 * experts.count)
    shared = z.width * (z.t * 3 * experts.shared_size // layout.tp + z.s * z.h * experts.shared_gate)
    inside = 0 if "experts" in modules else 2 * inner if z.grouped else 4 * inner
    return router + shared + z.width * z.received * (z.h + inside)


def _backward(config: Config, arch: Architecture, layout: Layout, layer: int, z: _Sizes) -> float:
    """Return the bytes that the backward of the last layer adds: gradients in its MLP, and first recomputed tensors."""
    modules = _recomputed_modules(config)
    gradients = z.width * 2 * z.s * z.h
    if arch.sparse[layer]:
        gradients += max(_experts_backward(arch, layout, z), _sum_over_etp(layout, z))
        again = _experts(arch, layout, (), z) if {"moe", "experts"} & {*modules} else 0
        again -= _experts(arch, layout, ("experts",), z) if "experts" in modules and "moe" not in modules else 0
    else:
        gradients += z.width * z.t * 3 * z.f
        again = _mlp((), z) if "mlp" in modules else z.width * z.t * z.f if "mlp_act" in modules else 0
    if config.memory.recompute == "full" and config.memory.recompute_layers is None:
        again = _layer(arch, layout, layer, (), z)
    return gradients + again


def _experts_backward(arch: Architecture, layout: Layout, z: _Sizes) -> float:
    """Return the bytes that the backward of the experts adds: gradients of tokens; where all experts run at once also
    inner gradients, the recomputed activation, the first matrices side by side, and the gradients of all matrices (of
    the first ones twice, while those of idle experts are cleared)."""
    experts = arch.experts
    assert experts is not None
    if not z.grouped:
        return z.width * z.received * 3 * z.h
    inner = experts.intermediate_size // layout.etp
    matrices = 7 * experts.count // layout.ep * inner * z.h
    return z.width * (z.received * (z.h + 4 * inner) + matrices)


def _delta_backward(config: Config, arch: Architecture, layout: Layout, layers: range, z: _Sizes) -> float:
    """Return the bytes that the backward of the last layer of Gated DeltaNet adds, less those that it and the layers
    behind it have freed."""
    last = max((n for n in layers if arch.linear[n]), default=None)
    if last is None or z.delta is None:
        return 0
    gone = _by_layers(config, arch, layout, layers, z)[last - layers.start :]
    return z.delta.backward + z.width * 4 * z.s * z.h - sum(gone)


def _block_backward(config: Config, arch: Architecture, layout: Layout, layers: range, z: _Sizes) -> float:
    """Return the same as `_delta_backward`, for the last layer whose heads are too wide for a kernel. Its MLP is behind
    it."""
    last = max((n for n in layers if is_by_blocks(arch, n)), default=None)
    if last is None or config.train.precision != "bf16":
        return 0
    gone = sum(_by_layers(config, arch, layout, layers, z)[last - layers.start :])
    whole = config.memory.recompute == "full" and config.memory.recompute_layers is None
    modules = () if whole else tuple(module for module in _recomputed_modules(config) if module != "core_attn")
    left = _layer(arch, layout, last, modules, z) - _mlp(modules, z) - z.width * z.s * z.h * arch.layers[last].sandwich
    return left - gone + z.width * 2 * z.s * z.h + backward_by_blocks(arch, layout, last, z.t)


def _sum_over_etp(layout: Layout, z: _Sizes) -> float:
    """Return the bytes that the forward of the last layer adds where ETP ranks sum the outputs of experts: the outputs,
    twice, the second time in the order in which they go back; the same in at least fp32; this rank's part of the sum,
    and the part rounded."""
    if layout.etp == 1:
        return 0
    exact = max(4, z.width)
    return z.received * z.h * (2 * z.width + exact + (exact + z.width) / layout.etp)


def _head(config: Config, arch: Architecture, layout: Layout, z: _Sizes) -> float:
    """Return the bytes of the loss head: hidden states and their gradient; a chunk of logits in fp32 and its gradient,
    rounded; and the gradient of the output matrix, in fp32 where the head does not add it to the buffer of gradients.
    At the end, without the chunk, that gradient is rounded, or uninitialized memory stands for it.
    """
    columns = math.ceil(arch.vocab_size / layout.tp)
    chunk, matrix = min(z.t * columns, FUSED_CHUNK_ELEMENTS), columns * z.h
    added = config.accumulates_in_products(on_gpu=True) and config.parallel.grad_reduce_dtype == "fp32"
    added &= not (arch.tie_embeddings and layout.pp == 1)
    return z.width * 2 * z.t * z.h + (0 if added else 4 * matrix) + max(chunk * (4 + z.width), z.width * matrix)
