"""Search the fastest layouts that fit among all legal ones, by estimates of memory and of time.

An estimate counts each kind of layer once a setting, and is arithmetic after that. The chosen candidate should go
through a dry run, as `isoloss.tools.plan` makes it with a preset.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

from isoloss.engine.config import rules
from isoloss.engine.config.schema import Config, MemoryConfig, ParallelConfig
from isoloss.engine.memory.estimate import kept_by_layers, step_memory
from isoloss.engine.memory.limits import room
from isoloss.models.architecture import Architecture
from isoloss.models.flops import layer_flops, output_flops
from isoloss.models.kinds.kind import SoftmaxAttention
from isoloss.models.mcore.stages import stage_layers
from isoloss.parallel import Layout, UserError
from isoloss.parallel.runtime.console import Progress
from isoloss.tools.plan.estimate import host_seconds, micro_batches, sequences
from isoloss.tools.plan.hardware import (
    ATTENTION_SHARE,
    GPUS_PER_NODE,
    LAUNCH_SECONDS,
    MATRIX_SHARE,
    MEMORY_SHARE,
    NETWORK_SHARE,
    Gpu,
)

DEGREES = (1, 2, 4, 8)
LONG = 16384  # tokens from which on a sequence is worth dividing
ROWS = (1, 2, 4)  # sequences of the largest length in a micro-batch
OFFLOADED = (0.5, 1.0)  # shares of the optimizer's state in CPU memory
# Bytes that ops without FLOPs move for each byte kept for the backward, with all kernels, as counted by dry runs.
# A ring merges its steps in fp32; experts copy their matrices side by side, and sort tokens.
MOVED_PER_KEPT, MOVED_BY_RINGS, MOVED_BY_EXPERTS = 4.2, 8.0, 10.4
# Share of a forward's matrix products that is computed again.
AGAIN = {"layernorm": 0.0, "mlp_act": 0.0, "mlp": 0.65, "moe": 0.75, "experts": 0.5, "full": 1.0}
# Ops that the host launches, forward and backward: in a layer, in its router and experts, and in an exchange with other
# ranks' experts; and the share of them that full recomputation adds, as counted by dry runs.
OPS_OF_LAYER, OPS_OF_EXPERTS, OPS_OF_EXCHANGE, OPS_AGAIN = 43, 55, 10, 0.4


@dataclass(frozen=True)
class Candidate:
    """A layout with its estimate. peaks: bytes of each pipeline rank. seconds: estimated time of a step."""

    config: Config
    layout: Layout
    peaks: tuple[float, ...]
    seconds: float
    tokens_per_gpu_second: float
    mfu: float


def search(config: Config, arch: Architecture, gpus: int, gpu: Gpu) -> list[Candidate]:
    """Return the legal candidates that fit, fastest first: for each layout and size of a micro-batch the one that
    recomputes least. More of the optimizer is offloaded only where nothing fits without full recomputation."""
    found = list(fitting([config], arch, gpus, gpu))
    if all(candidate.config.memory.recompute == "full" for candidate in found):
        found += fitting(offloaded(config), arch, gpus, gpu)
    return sorted(found, key=lambda candidate: candidate.seconds)


def fitting(configs: Sequence[Config], arch: Architecture, gpus: int, gpu: Gpu) -> Iterator[Candidate]:
    """Yield the candidates that fit, of each layout and number of rows in a micro-batch."""
    tried = [
        (config, rows, layout, parallel)
        for config in configs
        for layout, parallel in layouts(config, arch, gpus)
        for rows in ROWS
        if rows * layout.dp <= sequences(config)
    ]
    with Progress("searching", "layouts and micro-batches", lambda: len(tried)) as progress:
        for config, rows, layout, parallel in tried:
            batch = replace(config.batch, max_tokens=rows * config.data.max_length)
            if found := least_recomputed(replace(config, parallel=parallel, batch=batch), arch, layout, gpu):
                yield found
            progress.advance()


def offloaded(config: Config) -> list[Config]:
    """Return configurations with more of the optimizer in CPU memory."""
    shares = [share for share in OFFLOADED if share > config.memory.offload_optimizer]
    return [replace(config, memory=replace(config.memory, offload_optimizer=share)) for share in shares]


def layouts(config: Config, arch: Architecture, gpus: int) -> Iterator[tuple[Layout, ParallelConfig]]:
    """Yield layouts that the model and the number of GPUs admit. Tensor and expert parallelism stay inside a node."""
    context = DEGREES if config.data.max_length >= LONG else (1,)
    experts = DEGREES if arch.experts is not None else (1,)
    for degrees in product(DEGREES, DEGREES, DEGREES, context, context, experts, experts):
        axes = dict(zip(("tp", "pp", "vpp", "ulysses", "ring", "ep", "etp"), degrees))
        tp, pp, vpp, ulysses, _, ep, etp = degrees
        if max(tp * ulysses, ep * etp) > GPUS_PER_NODE or (vpp > 1 and pp == 1) or pp * vpp > arch.num_layers:
            continue
        if etp not in (1, tp):
            continue
        parallel = replace(config.parallel, **axes, stage_layers=(), sequence_parallel=None)
        try:
            layout = parallel.layout().with_world(gpus)
            rules.check(replace(config, parallel=parallel), arch, layout)
        except UserError:
            continue
        yield layout, parallel


def least_recomputed(config: Config, arch: Architecture, layout: Layout, gpu: Gpu) -> Candidate | None:
    for memory in recomputations(config.memory, arch, layout):
        candidate = replace(config, memory=memory)
        peaks = tuple(stage.peak for stage in step_memory(candidate, arch, layout))
        if max(peaks) <= room(candidate, gpu.memory):
            return timed(candidate, arch, layout, peaks, gpu)
    return None


def recomputations(memory: MemoryConfig, arch: Architecture, layout: Layout) -> Iterator[MemoryConfig]:
    """Yield settings of recomputation, from the one that recomputes least."""
    inner = "moe" if arch.experts is not None else "mlp"
    keys = {"recompute_modules": (), "recompute_layers": None}
    yield replace(memory, recompute="none", **keys)
    yield replace(memory, recompute="selective", **keys | {"recompute_modules": ("layernorm",)})
    most = max(stage_layers(arch, layout))
    for layers in range(2, most, max(1, most // 8)):
        yield replace(memory, recompute="full", **keys | {"recompute_layers": layers})
    yield replace(memory, recompute="selective", **keys | {"recompute_modules": ("layernorm", inner)})
    yield replace(memory, recompute="full", **keys)


# ---- seconds ---------------------------------------------------------------------------------------------------------


def timed(config: Config, arch: Architecture, layout: Layout, peaks: Sequence[float], gpu: Gpu) -> Candidate:
    """Return the candidate with its estimated time. peaks: bytes of its pipeline ranks."""
    length, count = config.data.max_length, micro_batches(config, layout)
    split = stage_layers(arch, layout)
    one = _micro_batch(config, arch, layout, max(split), gpu) * layout.vpp
    seconds = (count + (layout.pp - 1) / layout.vpp) * one + _gradients(config, arch, layout, gpu, one)
    seconds += host_seconds(config, arch, layout)
    tokens = sequences(config) * length
    flops = 3 * sequences(config) * (sum(layer_flops(arch, length)) + output_flops(arch, length))
    rate = tokens / seconds / layout.world_size
    return Candidate(config, layout, tuple(peaks), seconds, rate, flops / (seconds * layout.world_size * gpu.flops))


def _micro_batch(config: Config, arch: Architecture, layout: Layout, layers: int, gpu: Gpu) -> float:
    """Return the seconds of `layers` layers, forward and backward: of the device or the host, whichever takes longer,
    and of exchange."""
    length, rows = config.data.max_length, config.batch.max_tokens // config.data.max_length
    share = layers / arch.num_layers / (layout.tp * layout.context)
    forward = rows * sum(layer_flops(arch, length)) * share
    linear = rows * length * sum(layer_flops(arch, 1)) * share
    attention = max(forward - linear, 0.0)
    again = _computed_again(config, layers)
    head = rows * output_flops(arch, length) / (layout.tp * layout.context) / layout.pp / layout.vpp
    compute = (linear * (3 + again) + 4 * head) / (MATRIX_SHARE * gpu.flops)
    compute += attention * (3.5 + again) / (ATTENTION_SHARE * gpu.flops)
    plain = replace(config, memory=MemoryConfig())
    kept = kept_by_layers(plain, arch, layout, range(arch.num_layers - layers, arch.num_layers))
    moved = MOVED_BY_EXPERTS if arch.experts else MOVED_BY_RINGS if layout.ring > 1 else MOVED_PER_KEPT
    traffic = moved * kept * (1 + again / 3) / (MEMORY_SHARE * gpu.bandwidth)
    device = max(compute + traffic, LAUNCH_SECONDS * _launches(arch, layout, layers, again))
    return device + _exchange(config, arch, layout, layers, again, gpu)


def _launches(arch: Architecture, layout: Layout, layers: int, again: float) -> float:
    """Return the number of ops of `layers` layers, forward and backward, with recomputation."""
    ops = OPS_OF_LAYER
    if arch.experts is not None:
        ops += OPS_OF_EXPERTS + OPS_OF_EXCHANGE * (layout.ep * layout.etp > 1)
    return layers * ops * (1 + OPS_AGAIN * again)


def _computed_again(config: Config, layers: int) -> float:
    memory = config.memory
    if memory.recompute == "full":
        return AGAIN["full"] * min(memory.recompute_layers or layers, layers) / layers
    return sum(AGAIN.get(module, 0.0) for module in memory.recompute_modules)


def _exchange(config: Config, arch: Architecture, layout: Layout, layers: int, again: float, gpu: Gpu) -> float:
    """Return the seconds of exchange. TP: two gathers and two sums in the forward, six more in the backward. Ulysses:
    queries, keys and values there, outputs back. Ring: keys, values and their gradients. Experts: tokens both ways."""
    width, tokens = 2, config.batch.max_tokens // layout.context
    row = width * tokens * arch.hidden_size
    attentions = [layer.attention for layer in arch.layers if isinstance(layer.attention, SoftmaxAttention)]
    pairs = width * tokens * fmean(kind.kv_heads * (kind.head_dim + kind.value_dim) for kind in attentions) / layout.tp
    heads = width * tokens * fmean(kind.heads * kind.head_dim for kind in attentions) / layout.tp + pairs
    inside, outside = NETWORK_SHARE * gpu.nvlink, NETWORK_SHARE * gpu.infiniband
    seconds = layers * (10 + 4 * again) * row * (layout.tp - 1) / layout.tp / inside
    seconds += layers * (2 + again) * 1.5 * heads * (layout.ulysses - 1) / layout.ulysses / inside
    link = inside if layout.tp * layout.context <= GPUS_PER_NODE else outside
    seconds += layers * (3 + again) * pairs * (layout.ring - 1) / link
    if arch.experts is not None and layout.ep > 1:
        sent = row / (layout.tp if layout.sequence_parallel else 1) * arch.experts.top_k
        link = inside if layout.ep * layout.etp <= GPUS_PER_NODE else outside  # neighbors, whatever tp and context are
        seconds += layers * (4 + 2 * again) * sent * (layout.ep - 1) / layout.ep / link
    if arch.experts is not None and layout.etp > 1:  # the tokens of all that share an expert, and the sum of its parts
        sent = row / (layout.tp if layout.sequence_parallel else 1) * arch.experts.top_k
        seconds += layers * (4 + 2 * again) * sent * (layout.etp - 1) / inside
    if layout.pp > 1:
        sequence = row / (layout.tp if layout.sequence_parallel else 1)
        seconds += 2 * sequence / (inside if layout.world_size <= GPUS_PER_NODE else outside)
    return seconds


def _gradients(config: Config, arch: Architecture, layout: Layout, gpu: Gpu, one: float) -> float:
    """Return the seconds of the exchange of gradients and weights over data-parallel ranks that the last backward and
    the first forward do not hide."""
    ranks = layout.dp * layout.context
    if ranks == 1:
        return 0.0
    stage = step_memory(config, arch, layout)[0]
    link = NETWORK_SHARE * (gpu.nvlink if layout.world_size <= GPUS_PER_NODE else gpu.infiniband)
    reduce, gather = (size * (ranks - 1) / ranks / link for size in (stage.gradients, stage.weights))
    backward = one * 2 / 3 if config.overlaps_grad_reduce(on_gpu=True) else 0.0
    forward = one / 3 if config.overlaps_param_gather(on_gpu=True) else 0.0
    return max(reduce - backward, 0.0) + max(gather - forward, 0.0)
