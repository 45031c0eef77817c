"""Estimate the seconds of a batch of reinforcement learning: generation, log-probabilities, training, weight sync.

Every completion is taken to have rollout.max_new_tokens tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isoloss.engine.rl.config import RLConfig
from isoloss.models.architecture import Architecture
from isoloss.models.flops import layer_flops, output_flops
from isoloss.models.weights.weight_map import num_parameters
from isoloss.parallel import Layout
from isoloss.tools.plan.estimate import Estimate, micro_batches, seconds_of
from isoloss.tools.plan.hardware import MATRIX_SHARE, MEMORY_SHARE, NETWORK_SHARE, Gpu
from isoloss.tools.plan.report import RankReport

BYTES = 2  # size of a weight and of a cached number: servers run in bf16
CACHE_SHARE = 0.85  # share of a server's memory for weights and cache
WEIGHT_SHARE = 0.4  # share of a GPU that weights may take before a server is assumed to use more GPUs
PASSES = ("log-probabilities", "reference", "values")


@dataclass(frozen=True)
class BatchEstimate:
    """Seconds of a batch. servers: their number, with server_gpus each. running: completions of a server at a time."""

    servers: int
    server_gpus: int
    running: int
    generate: float
    logprobs: float
    train: float
    sync: float

    @property
    def seconds(self) -> float:
        return self.generate + self.logprobs + self.train + self.sync


def estimate_batch(
    config: RLConfig,
    arch: Architecture,
    layout: Layout,
    stages: Sequence[RankReport],
    step: Estimate,
    gpu: Gpu,
    server_gpus: int | None = None,
) -> BatchEstimate:
    """Estimate a batch. stages: report of a rank of every pipeline stage. step: estimate of an optimizer step.
    server_gpus: GPUs of one server; None: the fewest of which the weights take less than WEIGHT_SHARE.

    Servers decode by reading weights and cache once for each token of all that run (arXiv:2211.05102); those that share
    the trainer's GPUs (rollout.colocated) generate while it waits, and all wait for the slowest completion.
    """
    rollout, weights = config.rollout, BYTES * num_parameters(arch)
    if server_gpus is None:
        server_gpus = next(n for n in (1, 2, 4, 8) if weights < WEIGHT_SHARE * n * gpu.memory or n == 8)
    servers = max(1, layout.world_size // server_gpus if rollout.colocated else len(rollout.servers))
    completions = config.batch.global_size * rollout.num_generations
    room = CACHE_SHARE * server_gpus * gpu.memory - weights
    fitting = max(1, int(room / (cache_bytes(arch) * config.data.max_length)))
    running = min(math.ceil(completions / servers), max(1, rollout.concurrency // servers), fitting)
    waves = math.ceil(completions / (servers * running))
    generate = waves * rollout.max_new_tokens * _token_seconds(config, arch, weights, running, server_gpus, gpu)
    of_batch = micro_batches(config, layout) * config.algorithm.minibatches
    logprobs = of_batch * sum(_slowest(stages, name, gpu, each_micro_batch=True) for name in PASSES)
    sent = 0.0 if rollout.colocated else weights / (NETWORK_SHARE * gpu.infiniband)  # rank 0 sends all
    sync = sent + _slowest(stages, "weight sync", gpu)
    train = config.steps_per_batch * step.seconds
    return BatchEstimate(servers, server_gpus, running, generate, logprobs, train, sync)


def cache_bytes(arch: Architecture) -> float:
    """Return the bytes of the cache for a token of a completion, in all layers."""
    return BYTES * sum(layer.attention.cached for layer in arch.layers)


def _token_seconds(
    config: RLConfig, arch: Architecture, weights: float, running: int, server_gpus: int, gpu: Gpu
) -> float:
    """Return the seconds of a token for each running completion: of memory or arithmetic, whichever takes longer."""
    read = weights
    if arch.experts is not None:  # only experts that a token chose are read
        experts = 3 * arch.hidden_size * arch.experts.intermediate_size * BYTES
        layers = sum(arch.sparse)
        asked = arch.experts.count * (1 - (1 - arch.experts.top_k / arch.experts.count) ** running)
        read -= layers * experts * (arch.experts.count - asked)
    middle = config.data.max_length - config.rollout.max_new_tokens / 2
    read += running * cache_bytes(arch) * middle
    flops = running * (sum(layer_flops(arch, 1)) + output_flops(arch, 1))
    return max(read / (MEMORY_SHARE * gpu.bandwidth), flops / (MATRIX_SHARE * gpu.flops)) / server_gpus


def _slowest(stages: Sequence[RankReport], name: str, gpu: Gpu, *, each_micro_batch: bool = False) -> float:
    """Return the seconds of the phase `name` on the slowest stage; 0 if the run has no such phase."""
    found = [0.0]
    for report in stages:
        for phase in report.phases:
            if phase.name == name:
                seconds = seconds_of(phase, gpu)
                divisor = report.micro_batches if each_micro_batch else 1
                found.append((seconds.compute + seconds.exchange) / divisor)
    return max(found)
