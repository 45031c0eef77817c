"""Estimate the seconds of a step from the counts of a dry run, by a roofline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from isoloss.engine.batching.balance import CostModel
from isoloss.engine.config.schema import Config
from isoloss.engine.memory.estimate import step_memory
from isoloss.engine.rl.config import RLConfig
from isoloss.models.architecture import Architecture
from isoloss.parallel import Layout
from isoloss.tools.plan.hardware import (
    ATTENTION_SHARE,
    GPUS_PER_NODE,
    HOST_BANDWIDTH,
    HOST_LINK,
    LAUNCH_SECONDS,
    MATRIX_SHARE,
    MEMORY_SHARE,
    NETWORK_SHARE,
    Gpu,
)
from isoloss.tools.plan.report import Exchange, PhaseReport, RankReport

GRADIENT_GROUPS = ("dp_context", "expert_dp")
GATHER_OF_WEIGHTS = "allgather_into_tensor_coalesced_"


@dataclass(frozen=True)
class Seconds:
    """Seconds of a phase on one rank. gradients, weights: their exchange over data-parallel ranks."""

    matrices: float
    attention: float
    memory: float
    exchange: float
    gradients: float
    weights: float
    launches: float

    @property
    def compute(self) -> float:
        """Return the time of the device or of the host, whichever is longer."""
        return max(self.matrices + self.attention + self.memory, self.launches)


@dataclass(frozen=True)
class Estimate:
    """Estimate of a step. mfu: utilization by the FLOPs of the model, without recomputation (PaLM, appendix B)."""

    micro_batches: int
    seconds: float
    tokens_per_gpu_second: float
    mfu: float


def seconds_of(phase: PhaseReport, gpu: Gpu) -> Seconds:
    attention = sum(flops for op, flops in phase.flops.items() if "attention" in op)
    of_weights = [e for e in phase.exchanges if e.group in GRADIENT_GROUPS and e.op == GATHER_OF_WEIGHTS]
    weights = sum(transfer(e, gpu) for e in of_weights)
    gradients = sum(transfer(e, gpu) for e in phase.exchanges if e.group in GRADIENT_GROUPS) - weights
    return Seconds(
        (sum(phase.flops.values()) - attention) / (MATRIX_SHARE * gpu.flops),
        attention / (ATTENTION_SHARE * gpu.flops),
        sum(phase.traffic.values()) / (MEMORY_SHARE * gpu.bandwidth),
        sum(transfer(e, gpu) for e in phase.exchanges if e.group not in GRADIENT_GROUPS),
        gradients,
        weights,
        LAUNCH_SECONDS * sum(phase.launches.values()),
    )


def transfer(exchange: Exchange, gpu: Gpu) -> float:
    """Return the seconds of a ring algorithm: a rank sends (n - 1) / n of the whole, twice that for an all-reduce."""
    if exchange.ranks == 1:
        return 0.0
    share = (exchange.ranks - 1) / exchange.ranks
    if "allreduce" in exchange.op:
        share *= 2
    if exchange.op in ("send", "recv_"):
        share = 1.0 if exchange.op == "send" else 0.0
    link = gpu.nvlink if exchange.nodes == 1 else gpu.infiniband
    return share * exchange.nbytes / (NETWORK_SHARE * link)


def sequences(config: Config) -> int:
    """Return the number of sequences in an optimizer step; in reinforcement learning, completions of a minibatch."""
    if isinstance(config, RLConfig):
        return config.batch.global_size * config.rollout.num_generations // config.algorithm.minibatches
    return config.batch.global_size


def micro_batches(config: Config, layout: Layout) -> int:
    """Return the micro-batches of a data-parallel rank in a step whose rows all have data.max_length tokens."""
    rows = max(1, config.batch.max_tokens // config.data.max_length)
    count = math.ceil(math.ceil(sequences(config) / layout.dp) / rows)
    return math.ceil(count / layout.pp) * layout.pp if layout.vpp > 1 else count


def host_seconds(config: Config, arch: Architecture, layout: Layout) -> float:
    """Return the seconds in which the CPU steps the optimizer's offloaded part, on the rank with the largest part.

    Adam streams 28 bytes a parameter (reads gradient, weight and two moments, writes the last three) for all GPUs of a
    node; before that the gradient's 4 bytes go to the host over a GPU's link, after it the weight's 2 go back.
    """
    share = config.memory.offload_optimizer
    if share == 0:
        return 0.0
    on_device = replace(config, memory=replace(config.memory, offload_optimizer=0.0))
    stepped = share * max(stage.optimizer for stage in step_memory(on_device, arch, layout)) / 12
    ranks = min(layout.world_size, GPUS_PER_NODE)
    return stepped * (28 * ranks / HOST_BANDWIDTH + 6 / HOST_LINK)


def estimate(config: Config, arch: Architecture, layout: Layout, stages: Sequence[RankReport], gpu: Gpu) -> Estimate:
    """Estimate an optimizer step whose rows all have data.max_length tokens.

    stages: report of a rank of every pipeline stage. The slowest sets the pace; a pipeline of vpp chunks a rank idles
    for (pp - 1) / vpp micro-batches (arXiv:2104.04473).
    """
    count = micro_batches(config, layout)
    slowest, exposed, ends = 0.0, 0.0, 0.0
    for report in stages:
        micro_batch = seconds_of(report.phase("forward and backward"), gpu)
        one = (micro_batch.compute + micro_batch.exchange) / report.micro_batches
        slowest = max(slowest, one)
        backward = one * 2 / 3 if config.overlaps_grad_reduce(on_gpu=True) else 0.0
        forward = one / 3 if config.overlaps_param_gather(on_gpu=True) else 0.0
        parts = ((micro_batch.gradients, backward), (micro_batch.weights, forward))
        exposed = max(exposed, sum(max(exchange - hidden, 0.0) for exchange, hidden in parts))
        end = seconds_of(report.phase("optimizer"), gpu)
        ends = max(ends, end.compute + end.exchange + end.gradients + end.weights)
    seconds = (count + (layout.pp - 1) / layout.vpp) * slowest + exposed + ends
    seconds += host_seconds(config, arch, layout)
    tokens = sequences(config) * config.data.max_length
    model_flops = 3 * sequences(config) * float(CostModel.of(arch, config.lora).cost(config.data.max_length))
    return Estimate(
        count, seconds, tokens / seconds / layout.world_size, model_flops / (seconds * layout.world_size * gpu.flops)
    )
