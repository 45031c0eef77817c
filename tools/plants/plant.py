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

    micro_batches: of each rank. aggregation: of the loss's first term; others: those of further terms, where they
    differ from it. policy: of a policy loss; None: cross-entropy. moe: of a model with experts; None: a dense one.
    padded: whether a packed row has padding behind it. biases: whether selection biases after some steps are compared,
    instead of loss and gradients.
    """

    layout: Layout
    micro_batches: int
    aggregation: str
    others: tuple[str, ...] = ()
    policy: AlgorithmConfig | None = None
    moe: MoeConfig | None = None
    padded: bool = True
    biases: bool = False

    @property
    def aggregations(self) -> tuple[str, ...]:
        return (self.aggregation, *self.others)

    @property
    def divided(self) -> bool:
        """Whether an optimizer step is summed from several micro-batches, of one rank or of several."""
        return self.micro_batches > 1 or self.layout.dp > 1


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


def _by_name(name: str) -> Plant:
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
