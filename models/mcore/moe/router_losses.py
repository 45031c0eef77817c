"""Losses that the routers of experts add to that of the step.

A router sees a part of a packed row, which is a part of a step. So its losses are sums over tokens, with weights that
are known before any forward, as all others are; what a token needs to know of its document are counts, which are whole
numbers.

Shape suffixes: Z tokens that a router sees, E experts, X experts chosen for a token, S documents of the row, A losses,
O tokens of the step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.aggregation import Aggregation
from isoloss.parallel.collectives import sum_parts
from isoloss.parallel.normalizer import StepCounts

TINY = 1e-20  # sigmoid scores may all underflow


@dataclass(frozen=True)
class Routing:
    """A router's output for its tokens, in at least fp32.

    scores_ZE: softmax or sigmoid of the logits.
    chosen_ZX: the chosen experts.
    weights_ZX: weights of the chosen experts' outputs.
    given_Z: True where the choice was given; None where none was.
    """

    logits_ZE: Tensor
    scores_ZE: Tensor
    chosen_ZX: Tensor
    weights_ZX: Tensor
    given_Z: Tensor | None = None

    @property
    def chosen_ZE(self) -> Tensor:
        """Return a bool mask of the chosen experts."""
        return torch.zeros_like(self.logits_ZE, dtype=torch.bool).scatter(1, self.chosen_ZX, True)


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens that the routers of a rank see of a micro-batch: its slice of the row, under TP its part of that.

    piece_Z: the piece of the row that each belongs to, -1 for padding and dummy tokens; position_Z: in its documents.
    members_SP: 1 where a document goes through a piece, else 0, fp64.
    length_S, start_S: tokens of each document, int64, and where it begins in the concatenation of all of the step.
    row: the ranks that share the row, tp x context.
    router_losses: terms that the routers add to the loss, or None.
    sequence_S: the sequence in the step of each document, where sequences are cut into documents; members_SP is then 1
        where a document counts for a piece. None: a document is a sequence.
    choice_counts: counts of a first pass, or None.
    routes: the experts given for each token, [Z, X] int16, by layer from 1 over the whole model; -1 where none are.
    counts: where a router of a step with routes notes its choices; None in other steps.
    """

    piece_Z: Tensor
    position_Z: Tensor
    members_SP: Tensor
    length_S: Tensor
    start_S: Tensor
    row: dist.ProcessGroup
    router_losses: "RouterLosses | None" = None
    sequence_S: Tensor | None = None
    choice_counts: "ChoiceCounts | None" = None
    routes: Mapping[int, Tensor] = field(default_factory=dict)
    counts: "dict[int, Tensor] | None" = None

    def count(self, layer: int, routing: Routing) -> None:
        """Note how many choices of a layer were given, and of how many. A layer that is computed again says the
        same."""
        if self.counts is not None:
            given_Z = self.real_Z & False if routing.given_Z is None else self.real_Z & routing.given_Z
            self.counts[layer] = torch.stack([given_Z.sum(), self.real_Z.sum()])

    @property
    def real_Z(self) -> Tensor:
        return self.piece_Z >= 0

    def of_pieces(self, values_P: Tensor) -> Tensor:
        """The value of each token's piece, [Z], or [Z, n] of [P, n]; 0 for padding and dummy tokens."""
        return torch.cat([values_P, values_P.new_zeros(1, *values_P.shape[1:])])[self.piece_Z]

    @property
    def documents_Z(self) -> Tensor:
        """Return the number of documents that each token belongs to, int64."""
        return self.of_pieces(self.members_SP.sum(0)).to(torch.int64)


class ChoiceCounts:
    """Counts, of the rows that this rank has seen, of the tokens of each sequence that chose each expert.

    of_layer: counts of the step's sequences by layer, [U, E] fp64 each.
    """

    def __init__(self, sequences: int):
        self.sequences = sequences
        self.of_layer: dict[int, Tensor] = {}

    def add(self, layer: int, routing: Routing, tokens: RoutedTokens) -> None:
        """Count the choices of these tokens. No collectives."""
        assert tokens.sequence_S is not None, "sequences are cut into documents"
        chosen_PE = chosen_by_pieces(routing, tokens, torch.float64)
        none_UE = chosen_PE.new_zeros(self.sequences, chosen_PE.shape[1])
        self.of_layer.setdefault(layer, none_UE).index_add_(0, tokens.sequence_S, tokens.members_SP @ chosen_PE)


def chosen_by_pieces(routing: Routing, tokens: RoutedTokens, dtype: torch.dtype) -> Tensor:
    """Return how many of these tokens chose each expert, by piece of the row, [P, E]."""
    chosen_ZE = (routing.chosen_ZE & tokens.real_Z[:, None]).to(dtype)
    counts_PE = chosen_ZE.new_zeros(tokens.members_SP.shape[1], chosen_ZE.shape[1])
    if counts_PE.numel():
        counts_PE = counts_PE.index_add(0, tokens.piece_Z.clamp(min=0), chosen_ZE)
    return counts_PE


def sequence_balance(routing: Routing, tokens: RoutedTokens, chosen_UE: Tensor | None = None) -> Tensor:
    """Compute each token's term of its document's balance loss, [Z]; the mean over its documents where it has several.

    The loss of a document is sum_e f_e P_e (DeepSeek-V3, arXiv:2412.19437, eq. 17-20): f_e = E / (X length) * (how many
    of its tokens chose e), without gradient, and P_e the mean over its tokens of e's share of a token's scores.
    Where sequences are cut into documents, the loss is of a sequence.

    chosen_UE: how many tokens of each sequence of the step chose e, where its documents are in several rows.
    Collectives: one all-reduce of the counts [P, E] over the ranks that share the row, in the forward.
    """
    dtype, num_experts = routing.scores_ZE.dtype, routing.scores_ZE.shape[1]
    members_SP = tokens.members_SP.to(dtype)
    counts_PE = chosen_by_pieces(routing, tokens, dtype)
    counts_PE = sum_parts(counts_PE, tokens.row)  # of whole numbers: exact, in whatever order
    counts_SE = members_SP @ counts_PE
    if tokens.sequence_S is not None:
        same_SS = (tokens.sequence_S[:, None] == tokens.sequence_S).to(dtype)
        counts_SE = same_SS @ counts_SE if chosen_UE is None else chosen_UE[tokens.sequence_S].to(dtype)
    length_S1 = tokens.length_S[:, None].to(dtype)
    f_SE = counts_SE * num_experts / (routing.chosen_ZX.shape[1] * length_S1)
    f_PE = members_SP.T @ (f_SE / length_S1) / members_SP.sum(0).clamp(min=1)[:, None]
    shares_ZE = routing.scores_ZE / (routing.scores_ZE.sum(1, keepdim=True) + TINY)
    return (tokens.of_pieces(f_PE) * shares_ZE).sum(1)


def z_loss(routing: Routing, tokens: RoutedTokens, chosen_UE: Tensor | None = None) -> Tensor:
    """The square of the log-sum-exp of each token's logits, [Z] (ST-MoE, arXiv:2202.08906)."""
    del tokens, chosen_UE
    return routing.logits_ZE.logsumexp(1).square()


@dataclass(frozen=True)
class RouterLoss:
    """coefficient * sum(weight * per_token) over the real tokens of the step and the layers with experts. A token of
    several documents counts once for each.

    per_token: [Z], not yet weighted.
    aggregation: makes the weights, alike for all tokens of a document.
    name: name in the metrics of the sum, without the coefficient.
    """

    name: str
    per_token: Callable[[Routing, RoutedTokens, Tensor | None], Tensor]
    aggregation: Aggregation
    coefficient: float


class RouterLosses:
    """The losses of this rank's routers in one pass over a step.

    weights_AO: the weight of every token of the step in each loss, fp64.
    counts: totals of the weights of each loss.
    sums_A, consumed_A: the losses so far, without coefficients, and the weights that went into them; fp64.
    chosen: how many tokens of each sequence of the step chose each expert, [U, E] by layer, where a first pass found
        that; None: rows have whole sequences.
    """

    def __init__(self, losses: Sequence[RouterLoss], weights_AO: Tensor, counts: Sequence[StepCounts]):
        self.losses, self.weights_AO, self.counts = losses, weights_AO, counts
        self.chosen: Mapping[int, Tensor] | None = None
        self.sums_A = weights_AO.new_zeros(len(losses))
        self.consumed_A = weights_AO.new_zeros(len(losses))

    @property
    def read_choices(self) -> bool:
        """Return whether one of the losses reads the choices of all tokens of a sequence."""
        return any(loss.per_token is sequence_balance for loss in self.losses)

    def add(self, weights_ZE: Tensor, routing: Routing, tokens: RoutedTokens, layer: int = 0) -> Tensor:
        """weights_ZE, through whose backward the losses of these tokens are differentiated.

        Collectives: those of the losses.
        """
        total = routing.logits_ZE.new_zeros(())
        chosen_UE = None if self.chosen is None else self.chosen[layer]
        for index, loss in enumerate(self.losses):
            weights_S = self.weights_AO[index, tokens.start_S]
            weights_Z = tokens.of_pieces(weights_S @ tokens.members_SP).to(total.dtype)
            terms_Z = weights_Z * loss.per_token(routing, tokens, chosen_UE)
            total = total + loss.coefficient * terms_Z.sum()
            self.sums_A[index] += terms_Z.detach().sum(dtype=torch.float64)
            self.consumed_A[index] += weights_Z.sum(dtype=torch.float64)
        return _WithLoss.apply(weights_ZE, total) if self.losses else weights_ZE


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
