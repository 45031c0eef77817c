"""What a plant is, and how one gets into the engine."""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch

from isoloss.engine import engine as engine_module
from isoloss.engine import step as step_module
from isoloss.engine.config import MoeConfig
from isoloss.engine.rl.config import AlgorithmConfig
from isoloss.parallel import Layout


@dataclass(frozen=True)
class Run:
    """What decides whether a plant shows.

    documents, targets: tokens and targets of every sample, by micro-batch, of all dp ranks; () of an empty one.
    aggregation: of the loss's first term; others: those of further terms, where they differ from it. policy: of a
    policy loss; None: cross-entropy. moe: of a model with experts; None: a dense one. biases: whether selection biases
    after some steps are compared, instead of loss and gradients.
    """

    layout: Layout
    documents: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]
    aggregation: str
    others: tuple[str, ...] = ()
    policy: AlgorithmConfig | None = None
    moe: MoeConfig | None = None
    biases: bool = False

    @property
    def aggregations(self) -> tuple[str, ...]:
        return (self.aggregation, *self.others)

    @property
    def filled(self) -> int:
        """Micro-batches with a target, on the dp rank that has most of them."""
        of_rank = len(self.targets) // self.layout.dp
        ranks = (self.targets[first : first + of_rank] for first in range(0, len(self.targets), of_rank))
        return max(sum(map(any, of_one)) for of_one in ranks)

    @property
    def padded(self) -> bool:
        """Whether any packed row has padding behind it, or is nothing else."""
        shards = self.layout.context * (self.layout.tp if self.layout.sequence_parallel else 1)
        return any(sum(lengths) % shards or not lengths for lengths in self.documents)


def means_differ(micro_batches: tuple[tuple[int, ...], ...], mode: str) -> bool:
    """Whether the mean of the means over micro-batches weighs some token otherwise than `mode` does.

    micro_batches: the tokens of every sample that count. They can agree: for seq-mean-token-mean where every
    micro-batch holds one sequence, for token-mean where all hold as many tokens.
    """
    counts = [count for of_one in micro_batches for count in of_one if count]
    for of_one in micro_batches:
        for count in filter(None, of_one):
            right = {"token-mean": sum(counts), "seq-mean-token-mean": len(counts) * count}.get(mode)
            if right != sum(of_one) * len(micro_batches):  # both are the inverse of a weight
                return True
    return False


@dataclass(frozen=True)
class Plant:
    """patch: a context manager in which the bug is there. spoils: the runs whose loss or gradient must be wrong. needs:
    the same in words, what a run must have."""

    name: str
    patch: Callable[[], contextlib.AbstractContextManager]
    spoils: Callable[[Run], bool]
    needs: str

    def planted(self) -> contextlib.AbstractContextManager:
        return self.patch()

    def __reduce__(self):
        return (_by_name, (self.name,))  # functions made in a table do not pickle; the name does


def _by_name(name: str):
    from isoloss.tools.plants import EVERY_PLANT  # the table imports this module

    return EVERY_PLANT.get(name, NONE)


NONE = Plant("none", contextlib.nullcontext, lambda run: False, "")


def patch_prepare(change: Callable) -> contextlib.AbstractContextManager:
    """Patch the step's preparation: change(batch, samples, plan, mesh) -> batch."""
    original = step_module.prepare_step

    def prepare_step(samples, loss, plan, mesh, device):
        return change(original(samples, loss, plan, mesh, device), samples, plan, mesh)

    return mock.patch.object(engine_module, "prepare_step", prepare_step)


def with_weights(batch, scale: Callable[[int, torch.Tensor], torch.Tensor]):
    micro_batches = tuple(
        dataclasses.replace(m, weights_AN=scale(index, m.weights_AN)) for index, m in enumerate(batch.micro_batches)
    )
    return dataclasses.replace(batch, micro_batches=micro_batches)


def patch_reduction(change: Callable) -> contextlib.AbstractContextManager:
    """Patch the reduction of gradients: change(chunks, groups) follows it."""
    original = engine_module.finalize_model_grads

    def finalize_model_grads(chunks, **kwargs):
        original(chunks, **kwargs)
        change(chunks, kwargs["pg_collection"])

    return mock.patch.object(engine_module, "finalize_model_grads", finalize_model_grads)
