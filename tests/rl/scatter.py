"""What the ranks of the tests of samples that rank 0 holds run."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from isoloss.engine.batching.distribute import Scatter
from isoloss.engine.batching.sample import Sample
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.losses import policy_loss
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss, TokenInputs


def refused(config: RLConfig, samples: Sequence[Sample]) -> str:
    """What this rank raises where the samples cannot be made."""
    scatter = Scatter(Engine(config).mesh)
    try:
        scatter.make(lambda: [Sample(torch.tensor([]), torch.tensor([]))])
    except (ValueError, RuntimeError) as error:
        return str(error)
    finally:
        scatter.close()
    return "nothing"


@dataclass(frozen=True)
class Seen:
    """Of a rank. before, after: which samples it has before and after they are placed. placed: those placed on it.
    differences: between a step of samples that every rank has, and of those that rank 0 holds."""

    before: list[int]
    after: list[int]
    placed: list[int]
    differences: list[str]


def weighted(inputs: TokenInputs) -> torch.Tensor:
    return -(inputs.fields["weights"] * inputs.logprobs_N).sum(1)


def scattered(config: RLConfig, samples: Sequence[Sample]) -> Seen:
    engine, loss = Engine(config), policy_loss(config) if samples[0].target_shape == () else Loss.of(weighted)
    scatter, differences = Scatter(engine.mesh), []
    held = scatter.make(lambda: list(samples))
    plan, found = scatter.planned(held, engine.plan)
    if plan != engine.plan(samples):
        differences.append("plan")
    for index, (sample, before, after) in enumerate(zip(samples, held, found, strict=True)):
        differences += (
            [f"outline of {index}"] if tells(before) != tells(sample) or tells(after) != tells(sample) else []
        )
        differences += [] if after.tokens_T.is_meta or same(sample, after) else [f"sample {index}"]
    for name, one, other in zip(
        ("loss", "gradients", "logprobs"), step(engine, samples, loss), step(engine, scatter.hold(held), loss)
    ):
        differences += [] if torch.equal(one, other) else [name]
    scatter.close()
    placed = sorted(chain.from_iterable(plan.micro_batches[engine.mesh.dp.rank()]))
    return Seen(present(held), present(found), placed, differences)


def tells(sample: Sample) -> tuple:
    """What an outline has."""
    shapes = [(tensor.shape, tensor.dtype) for tensor in tensors_of(sample)]
    return sample.id, sample.group, sample.sequence, sample.set, [*sample.fields], shapes


def tensors_of(sample: Sample) -> list[torch.Tensor]:
    own = [each for each in (sample.targets_T, sample.routes) if each is not None]
    return [sample.tokens_T, sample.mask_T, *sample.fields.values(), *own]


def same(one: Sample, other: Sample) -> bool:
    return all(torch.equal(*pair) for pair in zip(tensors_of(one), tensors_of(other), strict=True))


def present(samples: Sequence[Sample]) -> list[int]:
    """Those whose every tensor has values; an assertion where some do."""
    found = []
    for index, sample in enumerate(samples):
        absent = {tensor.is_meta for tensor in tensors_of(sample)}
        assert len(absent) == 1, index
        found += [] if True in absent else [index]
    return found


def step(engine: Engine, samples: Sequence[Sample], loss: Loss) -> list[torch.Tensor]:
    """Loss, gradients, and log-probabilities, each in one vector; nothing is stepped."""
    metrics = engine.forward_backward(samples, loss)
    gradients = torch.cat([gradient.flatten().clone() for _, gradient in engine.gradients()])
    engine.zero_grad()
    return [torch.tensor(metrics.loss), gradients, torch.cat(engine.logprobs(samples))]
