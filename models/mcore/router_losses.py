"""Losses that the routers of experts add to that of the step.

A router sees a part of a packed row, which is a part of a step. So its losses are sums over tokens, with weights that
are known before any forward, as all others are; what a token needs to know of its document are counts, which are whole
numbers.

Shape suffixes: T tokens that a router sees, E experts, K experts chosen, D documents of the row, B losses, O tokens of
the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.aggregation import Aggregation
from isoloss.parallel.collectives import sum_parts
from isoloss.parallel.normalizer import StepCounts

TINY = 1e-20  # sigmoid scores may all underflow


@dataclass(frozen=True)
class Routing:
    """What a router made of its tokens, in at least fp32.

    scores_TE: softmax or sigmoid of the logits. chosen_TK: the chosen experts; weights_TK: what their outputs count.
    """

    logits_TE: Tensor
    scores_TE: Tensor
    chosen_TK: Tensor
    weights_TK: Tensor

    @property
    def chosen_TE(self) -> Tensor:
        """bool."""
        return torch.zeros_like(self.logits_TE, dtype=torch.bool).scatter(1, self.chosen_TK, True)


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens that the routers of a rank see of a micro-batch: its slice of the row, under TP its part of that.

    document_T: the document of the row that each belongs to. origin_T: where it stands in the concatenation of all
    samples of the step. Both -1 for padding and dummy tokens. length_D: tokens of each document of the whole row, the
    padding behind it not counted, int64. row: the ranks that share the row, tp x context. router_losses: what the
    routers add to the loss; None: nothing.
    """

    document_T: Tensor
    origin_T: Tensor
    length_D: Tensor
    row: dist.ProcessGroup
    router_losses: "RouterLosses | None" = None

    @property
    def real_T(self) -> Tensor:
        return self.document_T >= 0


def sequence_balance(routing: Routing, tokens: RoutedTokens) -> Tensor:
    """What each token adds to its document's balance loss, [T].

    The loss of a document is sum_e f_e P_e (DeepSeek-V3, arXiv:2412.19437, eq. 17-20): f_e = E / (K length) * (how many
    of its tokens chose e), without gradient, and P_e the mean over its tokens of e's share of a token's scores.
    Collectives: one all-reduce of the counts [D, E] over the ranks that share the row, in the forward.
    """
    dtype, num_experts = routing.scores_TE.dtype, routing.scores_TE.shape[1]
    document_T = tokens.document_T.clamp(min=0)
    chosen_TE = (routing.chosen_TE & tokens.real_T[:, None]).to(dtype)
    counts_DE = chosen_TE.new_zeros(len(tokens.length_D), num_experts).index_add(0, document_T, chosen_TE)
    counts_DE = sum_parts(counts_DE, tokens.row)  # of whole numbers: exact, in whatever order
    length_D1 = tokens.length_D[:, None].to(dtype)
    f_DE = counts_DE * num_experts / (routing.chosen_TK.shape[1] * length_D1)
    shares_TE = routing.scores_TE / (routing.scores_TE.sum(1, keepdim=True) + TINY)
    return ((f_DE / length_D1)[document_T] * shares_TE).sum(1)


def z_loss(routing: Routing, tokens: RoutedTokens) -> Tensor:
    """The square of the log-sum-exp of each token's logits, [T] (ST-MoE, arXiv:2202.08906)."""
    del tokens
    return routing.logits_TE.logsumexp(1).square()


@dataclass(frozen=True)
class RouterLoss:
    """coefficient * sum(weight * per_token) over the real tokens of the step and the layers with experts.

    per_token: [T], not yet weighted. aggregation: makes the weights. name: what the metrics call the sum, without the
    coefficient.
    """

    name: str
    per_token: Callable[[Routing, RoutedTokens], Tensor]
    aggregation: Aggregation
    coefficient: float


class RouterLosses:
    """What the routers of this rank do in one pass over a step, besides routing.

    weights_BO: the weight of every token of the step in each loss, fp64; a last column, index -1, is of padding, and 0.
    counts: what the weights of each loss add up to. sums_B, consumed_B: the losses so far, without coefficients, and
    the weights that went into them; fp64.
    """

    def __init__(self, losses: Sequence[RouterLoss], weights_BO: Tensor, counts: Sequence[StepCounts]):
        self.losses, self.weights_BO, self.counts = losses, weights_BO, counts
        self.sums_B = weights_BO.new_zeros(len(losses))
        self.consumed_B = weights_BO.new_zeros(len(losses))

    def add(self, weights_TE: Tensor, routing: Routing, tokens: RoutedTokens) -> Tensor:
        """weights_TE, through whose backward the losses of these tokens are differentiated.

        Collectives: those of the losses.
        """
        total = routing.logits_TE.new_zeros(())
        for index, loss in enumerate(self.losses):
            weights_T = self.weights_BO[index, tokens.origin_T].to(total.dtype)
            terms_T = weights_T * loss.per_token(routing, tokens)
            total = total + loss.coefficient * terms_T.sum()
            self.sums_B[index] += terms_T.detach().sum(dtype=torch.float64)
            self.consumed_B[index] += weights_T.sum(dtype=torch.float64)
        return _WithLoss.apply(weights_TE, total) if self.losses else weights_TE


class _WithLoss(torch.autograd.Function):
    """x, with a loss whose gradient is 1: the pipeline's schedule differentiates what the last stage returns, and this
    loss arises on every stage."""

    @staticmethod
    def forward(ctx, x, loss):
        del ctx, loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        del ctx
        return grad, grad.new_ones(())
