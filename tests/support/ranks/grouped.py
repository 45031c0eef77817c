"""The fast path of experts, run on a CPU: as on a GPU, but for the product, which is written out here."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.engine.config.schema import Config, LossConfig
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from isoloss.models.mcore.moe import dispatch, experts, grouped_experts
from isoloss.tools.prove.parity import thaw
from support.runs import training


def product(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """What torch.nn.functional.grouped_mm gives; and where a matrix had no rows, or a row no matrix, what GPUs leave
    there."""
    ends = offs.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends)]
    if b.ndim == 3:
        of_none = a.new_full((len(a) - ends[-1], b.shape[2]), torch.nan)
        return torch.cat([*(a[rows] @ matrix for rows, matrix in zip(groups, b, strict=True)), of_none])
    nothing = torch.full((len(a), b.shape[1]), torch.nan, dtype=a.dtype)
    return torch.stack([a[:, rows] @ b[rows] if rows.stop > rows.start else nothing for rows in groups])


class _Spoiled(torch.autograd.Function):
    """Rows with nan behind the last that belongs to an expert, and so are their gradients."""

    @staticmethod
    def forward(ctx, rows, ends_E):
        ctx.save_for_backward(ends_E)
        return _spoiled(rows, ends_E)

    @staticmethod
    def backward(ctx, grad):
        return _spoiled(grad, *ctx.saved_tensors), None


def _spoiled(rows: Tensor, ends_E: Tensor) -> Tensor:
    rows = rows.clone()
    rows[int(ends_E[-1]) :] = torch.nan
    return rows


@contextlib.contextmanager
def on_cpu() -> Iterator[Counter[str]]:
    """Within it, how often this rank runs experts, waits for sizes, and sends rows forwards; what is in places of
    messages that nobody needs is nan, in both directions."""
    counts = Counter()

    def counted(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    def at_once(self, rows, weights, ends_E, **how):
        rows, weights = (_Spoiled.apply(each, ends_E) for each in (rows, weights))
        counts["free"] += len(rows) - int(ends_E[-1])
        return _Spoiled.apply(run(self, rows, weights, ends_E, **how), ends_E)

    run = grouped_experts.LocalExperts.at_once
    with (
        mock.patch.object(grouped_experts, "on_gpu", lambda hidden: True),
        mock.patch.object(grouped_experts, "grouped_mm", counted("products", product)),
        mock.patch.object(grouped_experts.LocalExperts, "at_once", counted("layers", at_once)),
        mock.patch.object(dispatch, "to_host", counted("waits", dispatch.to_host)),
        mock.patch.object(experts, "to_experts", counted("dispatches", experts.to_experts)),
    ):
        yield counts


@dataclass
class Step:
    """Of an Engine.train_step. counts: see `on_cpu`."""

    loss: float
    terms: dict[str, float]
    norm: float
    gradients: dict[str, np.ndarray]
    reruns: int | None
    counts: Counter[str]


@contextlib.contextmanager
def one_row_lost() -> Iterator[None]:
    """Within it, this rank says so of a message of every layer, whatever it sends."""
    slots_of = experts.slots_of

    def losing(rows, bound, groups):
        bound.lost.add_(1)
        return slots_of(rows, bound, groups)

    with mock.patch.object(experts, "slots_of", losing):
        yield


def steps(config: Config, frozen: bytes, aggregation: str, number: int, forced: bool, losing: int | None = None):
    """So many steps, and the weights (with selection biases) after them.

    forced: experts as on a GPU. losing: the rank that says that it lost a row.
    """
    engine, samples, found = Engine(config), thaw(frozen), []
    loss, last = cross_entropy(LossConfig(aggregation)), {}
    optim_step = engine.optim_step

    def keep_gradients(*limits):
        last.clear()
        last.update({name: gradient.numpy(force=True).copy() for name, gradient in engine.gradients()})
        return optim_step(*limits)

    engine.optim_step = keep_gradients
    for _ in range(number):
        lost = one_row_lost() if losing == dist.get_rank() else contextlib.nullcontext()
        with lost, on_cpu() if forced else contextlib.nullcontext(Counter()) as counts:
            metrics, result = engine.train_step(samples, loss)
        terms = {**metrics.terms, "weights": metrics.weight_sum, "magnitude": metrics.magnitude}
        found.append(Step(metrics.loss, terms, result.grad_norm, dict(last), metrics.reruns, counts))
    return found, training.weights(engine)


def step_after_a_call(config: Config, frozen: bytes) -> tuple[float, float]:
    """The gradient norm of a call and a step of the same samples, and twice that of the step alone."""
    engine, samples = Engine(config), thaw(frozen)
    loss = cross_entropy(LossConfig("sum"))
    with on_cpu():
        engine.forward_backward(samples, loss)
        both = engine.train_step(samples, loss, lr=0.0)[1].grad_norm
        return both, 2 * engine.train_step(samples, loss, lr=0.0)[1].grad_norm


def gradients(config: Config, frozen: bytes, calls: Sequence[Sequence[int]]):
    """As `training.gradients`, and what was counted."""
    with on_cpu() as counts:
        norm, of_weights = training.gradients(config, frozen, calls)
    return norm, of_weights, counts
