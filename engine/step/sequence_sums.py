"""Sums over sequences whose samples are in several micro-batches.

No micro-batch has all terms of such a sum. But a loss reads of the model only a few numbers x for each target (its
log-probability, entropy or value), and by the chain rule its gradient is the sum over targets of dL/dx times that of x.
So a pass without gradients collects x; here the loss of all targets is computed at once, with sums over all ranks,
and differentiated with respect to x; a second pass multiplies the gradient of each x by its known slope. Loss and
gradient are those of sequences that are not cut, whatever the loss does with its sums.

Shape suffixes: N targets of this rank, U sequences of the step, A aggregations of the loss, T tokens of the step, K
targets of a position.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.engine.batching.packing import PackedBatch
from isoloss.engine.step.losses import Fields, Loss, TokenInputs
from isoloss.parallel import UserError
from isoloss.parallel.sequence import sum_over_documents

MODEL_OUTPUTS = ("logprobs_N", "entropy_N", "values_N")
Part = tuple[PackedBatch, TokenInputs]  # a micro-batch, and what the model computed of it, without a graph


@dataclass(frozen=True)
class KnownSums:
    """The sums over sequences, and the slopes of the loss, that are known before the pass that differentiates it.

    totals: results of the calls of sequence_sum, in their order, [U] each.
    slopes: derivatives of the step's loss with respect to each target's number, by its name in TokenInputs: [T] or
        [T, K] in the order of the step's samples; 0 for targets of other ranks.
    """

    totals: Sequence[Tensor]
    slopes: Mapping[str, Tensor]

    def replayed(self, sequence_N: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the `TokenInputs.sums` of a micro-batch. sequence_N: the sequence of each of its targets."""
        left: Iterator[Tensor] = iter(self.totals)

        def sums(values_N: Tensor) -> Tensor:
            total_U = next(left, None)
            if total_U is None:
                raise _uneven()
            return total_U[sequence_N].to(values_N.dtype)

        return sums

    def linear(self, inputs: TokenInputs, origin_N: Tensor) -> Tensor:
        """Return a number with the gradient of these targets' part of the loss. origin_N: their places in the step."""
        parts = [(slope_T[origin_N] * getattr(inputs, name)).sum() for name, slope_T in self.slopes.items()]
        return torch.stack(parts).sum()


def observed(loss: Loss) -> list[Callable[[TokenInputs], object]]:
    """Return the further values of a loss, in the order in which a pass computes them."""
    return [
        *loss.mean_metrics.values(),
        *loss.correlation_metrics.values(),
        *loss.max_metrics.values(),
        *loss.outputs.values(),
    ]


def calls_sums(loss: Loss, fields: Mapping[str, Tensor], *, target_shape: tuple[int, ...], critic: bool) -> bool:
    """Return whether a loss sums over sequences: it is computed for no target, as for an empty micro-batch.

    fields: fields of a sample; outlines are enough.
    """
    calls = []

    def sums(values_N: Tensor) -> Tensor:
        calls.append(True)
        return values_N

    none = torch.zeros(0, requires_grad=True)
    nothing = none.new_zeros((0, *target_shape)) + none.sum()
    no_fields = Fields({name: torch.zeros((0, *values.shape[1:])) for name, values in fields.items()})
    document_N, one = torch.zeros(0, dtype=torch.int64), dist.group.WORLD
    assert one is not None
    of_model = (none + 0, None, none) if critic else (nothing, none + 0, None)
    inputs = TokenInputs(*of_model, no_fields, document_N, 1, one, sums)
    for term in loss.terms:
        term.values(inputs)
    for of in observed(loss):
        of(inputs)
    return bool(calls)


def refuse_sums(values_N: Tensor) -> Tensor:
    """Raise UserError: `calls_sums` saw no call of sequence_sum, so that none is known."""
    del values_N
    raise _uneven()


def _uneven() -> UserError:
    return UserError(
        "a loss calls sequence_sum for some micro-batches only, or more often for some than for others, and "
        "Sample.sequence says that sequences are cut into several samples: call it always, also without targets"
    )


def known_sums(loss: Loss, parts: Sequence[Part], sequences: int, tokens: int, group: dist.ProcessGroup) -> KnownSums:
    """Return the sums and slopes of a step from what a pass without gradients computed of all micro-batches of a rank.

    sequences, tokens: their number in the step.
    Collectives: for each call of sequence_sum an all-reduce over `group`, the ranks that share the step, and one in its
    backward.
    """
    rows, each = zip(*parts)
    sequence_N = torch.cat([row.sequence_N for row in rows])
    origin_N = torch.cat([row.origin_N for row in rows])
    leaves = {}
    for name in MODEL_OUTPUTS:
        if getattr(each[0], name) is not None:
            leaves[name] = torch.cat([getattr(inputs, name) for inputs in each]).detach().requires_grad_()
    fields = {name: torch.cat([inputs.fields[name] for inputs in each]) for name in each[0].fields}
    totals: list[Tensor] = []

    def sums(values_N: Tensor) -> Tensor:
        total_U = sum_over_documents(values_N, sequence_N, sequences, group)
        totals.append(total_U.detach())
        return total_U[sequence_N]

    inputs = replace(each[0], **leaves, fields=Fields(fields), document_N=sequence_N, sums=sums)
    weights_AN = torch.cat([row.weights_AN for row in rows], 1).to(each[0].logprobs_N.dtype)
    with torch.enable_grad():
        summed = [
            term.coefficient * (weights_AN[loss.aggregations.index(term.aggregation)] * term.values(inputs)).sum()
            for term in loss.terms
        ]
        gradients = torch.autograd.grad(
            torch.stack(summed).sum(), [*leaves.values()], allow_unused=True, materialize_grads=True
        )
    with torch.no_grad():
        for of in observed(loss):
            of(inputs)
    slopes = {}
    for name, gradient_N in zip(leaves, gradients):
        if len(gradient_N) == len(origin_N):  # a critic has no log-probabilities
            slopes[name] = gradient_N.new_zeros((tokens, *gradient_N.shape[1:]))
            slopes[name][origin_N] = gradient_N
    return KnownSums(totals, slopes)
