"""Go through the phases of a run: a step of supervised fine-tuning; in reinforcement learning the log-probabilities
of a batch, the steps of policy and critic, and the weight stream to the servers."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import Config
from isoloss.engine.rl.backends.sglang.bucket import flatten
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.losses import policy_loss, value_loss
from isoloss.engine.rl.reference import Reference
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss, cross_entropy
from isoloss.models.mcore.weight_stream import Receives
from isoloss.parallel import Layout
from isoloss.tools.plan.recorder import Recorder

STEPS = 2  # the second begins with the memory that the first leaves allocated
GENERATION = "generation"  # by servers on the same device, while the trainer waits
HALF = " of half the rows"  # suffix of the name of a phase
# Fields of every sample in reinforcement learning. A policy with one step a batch needs no old log-probabilities.
FIELDS = ("advantages", "rollout_logprobs", "ref_logprobs", "train_logprobs", "old_values", "returns")


def take(engine: Engine, config: Config, rows: Sequence[Sample], recorder: Recorder, halves: bool = False) -> int:
    """Go through the phases. Return the number of micro-batches of a step on this rank.

    halves: whether to run forward and backward of half the rows too; the difference separates the work of a
    micro-batch from the work that a step does once.
    """
    if not isinstance(config, RLConfig):
        return _train(engine, rows, cross_entropy(config.loss), recorder, halves=halves)
    with unset_fake_temporarily():  # tensors of the host
        samples = [replace(row, fields={name: torch.zeros(len(row)) for name in FIELDS}) for row in rows]
    temperature, algorithm = config.rollout.temperature, config.algorithm
    reference = critic = None
    if algorithm.uses_reference:
        with recorder.phase("build reference"):
            reference = Reference(engine, offload=algorithm.reference_offload)
    if algorithm.uses_critic:
        with recorder.phase("build critic"):
            critic = Engine(config, engine.source, critic_of=engine)
    leaving = [each for each in (reference, critic) if each is not None] if config.rollout.colocated else []
    for _ in range(1 if halves else STEPS):
        if config.rollout.colocated:
            with recorder.phase("leave device"):
                engine.offload(weights=False)
                for tenant in leaving:
                    tenant.offload()
        if config.rollout.backend == "sglang":
            with recorder.phase("weight sync"):
                _stream(engine, config)
                if config.rollout.colocated:
                    engine.offload()
        if config.rollout.colocated:
            with recorder.phase(GENERATION):
                pass
        with recorder.phase("log-probabilities"):
            engine.logprobs(rows, temperature)
        if reference is not None:
            with recorder.phase("reference"):
                reference.logprobs(rows, temperature)
        if critic is not None:
            with recorder.phase("values"):
                critic.values(rows)
            _train(critic, samples, value_loss(algorithm, config.loss), recorder, "critic ", steps=1, halves=halves)
        count = _train(engine, samples, policy_loss(config), recorder, steps=1, halves=halves)
    return count


def _train(
    engine: Engine,
    samples: Sequence[Sample],
    loss: Loss,
    recorder: Recorder,
    whose: str = "",
    steps: int = STEPS,
    halves: bool = False,
) -> int:
    """Take optimizer steps. Return the number of micro-batches of the last one."""
    whole, half = ("", samples), (HALF, samples[: len(samples) // 2])
    for suffix, part in [half] * steps + [whole] if halves else [whole] * steps:
        with engine.overlap.reduce_during_backward():  # as in `train_step`
            with recorder.phase(f"{whose}forward and backward{suffix}"):
                metrics = engine._forward_backward(part, loss, engine.config.moe.dispatch_bound)
            with recorder.phase(f"{whose}optimizer"):
                engine.optim_step()
    return metrics.micro_batches


def _stream(engine: Engine, config: RLConfig) -> None:
    """Make every bucket as it is sent: one tensor of bytes. Of an adapter the factors, one after the other."""
    if engine.trained.adapter is not None:
        for _, factor in engine.trained.adapter.whole_tensors():
            factor.contiguous()
        return
    receives: dict[str, Receives] = {"tensor": "every rank", "broadcast": "owner", "disk": "rank 0"}
    for bucket in engine.weight_stream(config.rollout.bucket_mb << 20, receives[config.rollout.weight_sync]):
        if bucket:
            flatten(bucket)


def full_rows(tokens: int, layout: Layout, documents: int = 1) -> Sequence[Sample]:
    """Return twice as many rows for every data-parallel rank as its pipeline has stages, each of `documents` documents
    of equal length in which every token but the first is a target."""
    length = tokens // documents
    mask_T = torch.ones(length, dtype=torch.bool)
    mask_T[0] = False
    return [Sample(torch.zeros(length, dtype=torch.int64), mask_T)] * (layout.dp * 2 * layout.pp * documents)
