"""Tokens to their experts and back, without the host waiting for more than the sizes of messages.

The order of rows and messages is that of Megatron's all-to-all dispatcher, which is the twin and serves where experts
are not grouped. That one waits for the device to select rows, to split them by expert, and for the sizes; it adds up
a token's experts by atomic additions in bf16. Here, rows are gathered by index both ways: tokens of one expert follow
each other, and of an expert in the order of tokens. Without other ranks, all sizes are known.

With a bound (`moe.dispatch_bound`) every message has room for the same number of rows, and the host waits for nothing:
who sent how many is known on the device. What is in the rest of a message reaches nobody. Rows beyond the bound are
lost, and counted: the step is then worth nothing, and is run again without a bound (`Engine.train_step`).

Shape suffixes: Z tokens of this rank, E experts, X experts chosen for a token, R rows (a token for each of its
experts), D hidden size, P ranks of EP, M messages to this rank, C room of a message.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from isoloss.parallel.ops.fused import Fused, precise


@dataclass(frozen=True)
class Groups:
    """The ranks that share experts: ep those that have others, etp those that have other columns of the same, both
    together in the order [ep, etp]."""

    ep: dist.ProcessGroup
    etp: dist.ProcessGroup
    both: dist.ProcessGroup

    @property
    def alone(self) -> bool:
        return self.both.size() == 1


@dataclass(frozen=True)
class Rows:
    """The token and expert of each row.

    pair_R: index of the row's (token, expert) among all pairs. token_R: index of the row's token.
    row_ZX: indices of each token's rows.
    ends_E: end of each expert's rows, int32.
    """

    pair_R: Tensor
    token_R: Tensor
    row_ZX: Tensor
    ends_E: Tensor


@dataclass(frozen=True)
class Sizes:
    """Rows of the messages of a layer, on the host; known when a pass over the row is repeated.

    sent, received: to and from each EP rank. gathered: what each ETP rank received.
    chunks: rows of each sender and expert of this rank, [etp x ep, experts], in the order that they come in.
    ends_E: where each of these experts' rows end, int32 on the device.
    """

    sent: list[int]
    received: list[int]
    gathered: list[int]
    chunks: np.ndarray
    ends_E: Tensor

    @property
    def empty(self) -> list[int]:
        """Which of this rank's experts get no rows."""
        return np.flatnonzero(self.chunks.sum(0) == 0).tolist()

    def sent_of(self, rows: Rows) -> Rows:
        return rows

    def there(self, sent: Tensor, groups: Groups) -> Tensor:
        received = all_to_all(groups.ep, sent, self.received, self.sent)
        received = gather_from_sequence_parallel_region(received, group=groups.etp, output_split_sizes=self.gathered)
        return _regrouped(received, self.chunks)

    def back(self, output: Tensor, groups: Groups) -> Tensor:
        returned = _summed_over_etp(_regrouped(output, self.chunks.T), groups, self.gathered)
        return all_to_all(groups.ep, returned, self.sent, self.received)


@dataclass(frozen=True)
class Bound:
    """A bound on the rows of each message of a micro-batch.

    share: factor of the even share of a rank's rows.
    tokens: largest number of tokens of any rank of the micro-batch.
    lost: 0-d fp64 on the device; the rows that had no room are added to it.
    """

    share: float
    tokens: int
    lost: Tensor

    def room(self, chosen: int, experts: int, ranks: int) -> int:
        """Return the number of rows. chosen: experts of a token. experts: number on each of `ranks` EP ranks."""
        even = math.ceil(self.share * self.tokens * chosen / ranks)
        return min(-(-even // MULTIPLE) * MULTIPLE, self.tokens * min(chosen, experts))


MULTIPLE = 8  # of rows


@dataclass(frozen=True)
class Slots:
    """Places in messages of one size; known when a pass over the row is repeated.

    sent: rows in the places of this rank's messages; a free place holds any row.
    place_R: index of the received place of each row; rows are sorted by expert, free places last.
    row_R1: index of the row of each place, the inverse of `place_R`.
    ends_E: end of each local expert's rows, int32.
    """

    sent: Rows
    place_R: Tensor
    row_R1: Tensor
    ends_E: Tensor

    def sent_of(self, rows: Rows) -> Rows:
        del rows
        return self.sent

    def there(self, sent: Tensor, groups: Groups) -> Tensor:
        received = gather_from_sequence_parallel_region(all_to_all(groups.ep, sent), group=groups.etp)
        return _Spread.apply(received, self.place_R, self.row_R1)

    def back(self, output: Tensor, groups: Groups) -> Tensor:
        returned = _summed_over_etp(_Collect.apply(output, self.place_R, self.row_R1), groups, None)
        return all_to_all(groups.ep, returned)


def rows_by_expert(chosen_ZX: Tensor, num_experts: int) -> Rows:
    sorted_R, pair_R = chosen_ZX.flatten().sort(stable=True)
    row_ZX = torch.empty_like(pair_R).scatter_(0, pair_R, torch.arange(len(pair_R), device=pair_R.device))
    experts_E = torch.arange(num_experts, device=pair_R.device)
    ends_E = torch.searchsorted(sorted_R, experts_E, right=True, out_int32=True)
    return Rows(pair_R, pair_R // chosen_ZX.shape[1], row_ZX.view_as(chosen_ZX), ends_E)


def sizes_of(rows: Rows, groups: Groups) -> Sizes:
    """Return the sizes of messages. Collectives: one all-gather of counts over `groups.both`; the host waits for it."""
    num_ep, num_etp, counts = groups.ep.size(), groups.etp.size(), _counts(rows, groups)
    of_mine = counts[:, :, groups.ep.rank()].transpose(0, 1).flatten(0, 1)
    ends_E = of_mine.sum(0).cumsum(0).to(torch.int32)
    known = to_host(counts, len(rows.pair_R))
    chunks = known[:, :, groups.ep.rank()].swapaxes(0, 1)
    return Sizes(
        sent=known[groups.ep.rank(), groups.etp.rank()].sum(1).tolist(),
        received=chunks[groups.etp.rank()].sum(1).tolist(),
        gathered=chunks.sum((1, 2)).tolist(),
        chunks=chunks.reshape(num_etp * num_ep, -1),
        ends_E=ends_E,
    )


def _counts(rows: Rows, groups: Groups) -> Tensor:
    """Return the rows of each sender for each EP rank's experts, [ep, etp, ep, E]. Collectives: one all-gather."""
    counts_E = rows.ends_E.diff(prepend=rows.ends_E.new_zeros(1))
    num_ep, num_etp, num_experts = groups.ep.size(), groups.etp.size(), len(counts_E)
    counts = counts_E.new_empty(num_ep * num_etp * num_experts)
    dist.all_gather_into_tensor(counts, counts_E, group=groups.both)
    return counts.view(num_ep, num_etp, num_ep, num_experts // num_ep)


def slots_of(rows: Rows, bound: Bound, groups: Groups) -> Slots:
    """Return the slots; rows without room are added to `bound.lost`. Collectives: as `sizes_of`; no wait."""
    counts = _counts(rows, groups)
    num_ep, _, _, num_experts = counts.shape
    room = bound.room(rows.row_ZX.shape[1], num_experts, num_ep)
    bound.lost.add_((counts.sum(3) - room).clamp(min=0).sum())
    of_place_C = torch.arange(room, device=counts.device)

    ends_P = rows.ends_E.view(num_ep, num_experts)[:, -1].long()  # of this rank's rows, by receiver
    starts_P = torch.nn.functional.pad(ends_P[:-1], (1, 0))
    row_S = (starts_P[:, None] + of_place_C).clamp(max=len(rows.pair_R) - 1).flatten()
    receiver_ZX = torch.searchsorted(ends_P, rows.row_ZX, right=True)
    place_ZX = receiver_ZX * room + (rows.row_ZX - starts_P[receiver_ZX]).clamp(max=room - 1)
    sent = Rows(rows.pair_R[row_S], rows.token_R[row_S], place_ZX, rows.ends_E)

    # In each message, where the rows of each expert end, in the order that messages come in: [etp x ep].
    ends_ME = counts[:, :, groups.ep.rank()].transpose(0, 1).flatten(0, 1).cumsum(1).clamp(max=room)
    place_MC = of_place_C.expand(len(ends_ME), -1).contiguous()
    expert_MC = torch.searchsorted(ends_ME, place_MC, right=True, out_int32=True)  # one more than there are: free
    place_R = expert_MC.flatten().sort(stable=True).indices
    row_R = torch.empty_like(place_R).scatter_(0, place_R, torch.arange(len(place_R), device=place_R.device))
    return Slots(sent, place_R, row_R.view(-1, 1), ends_ME.sum(0).to(torch.int32))


def to_host(counts: Tensor, rows: int) -> np.ndarray:
    """Copy counts to the host, the one wait. rows: number of rows sent, for a dry run, which makes up the rest."""
    del rows
    return counts.cpu().numpy()


def to_experts(
    hidden_ZD: Tensor, weights_ZX: Tensor, rows: Rows, sizes: Sizes | Slots | None, groups: Groups
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of this rank's experts, their weights, and where each expert's rows end; behind the last of these ends
    are free places, if any.

    sizes: None without other ranks.
    Collectives: an all-to-all over EP and a gather over ETP of rows, and of weights.
    """
    rows = rows if sizes is None else sizes.sent_of(rows)
    sent_RD = _Spread.apply(hidden_ZD, rows.token_R, rows.row_ZX)
    sent_R = _Spread.apply(weights_ZX.flatten(), rows.pair_R, rows.row_ZX.view(-1, 1))
    if sizes is None:
        return sent_RD, sent_R, rows.ends_E
    return sizes.there(sent_RD, groups), sizes.there(sent_R, groups), sizes.ends_E


def from_experts(output_RD: Tensor, rows: Rows, sizes: Sizes | Slots | None, groups: Groups) -> Tensor:
    """For each token the sum over its experts, [Z, D].

    Collectives: a reduce-scatter over ETP and an all-to-all over EP.
    """
    if sizes is not None:
        rows, output_RD = sizes.sent_of(rows), sizes.back(output_RD, groups)
    return _Collect.apply(output_RD, rows.token_R, rows.row_ZX)


def _summed_over_etp(returned: Tensor, groups: Groups, gathered: list[int] | None) -> Tensor:
    """Sum the parts of the ETP ranks in at least fp32. gathered: number of rows of each rank; None: equal numbers."""
    if groups.etp.size() == 1:
        return returned
    wide = reduce_scatter_to_sequence_parallel_region(precise(returned), group=groups.etp, input_split_sizes=gathered)
    return wide.to(returned.dtype)


def _regrouped(rows: Tensor, chunks: np.ndarray) -> Tensor:
    """Return chunks that stand in the order [a, b], with these numbers of rows, in the order [b, a]."""
    if 1 in chunks.shape:
        return rows
    parts = rows.split(chunks.ravel().tolist())
    return torch.cat([parts[index] for index in np.arange(chunks.size).reshape(chunks.shape).T.ravel()])


class _Spread(torch.autograd.Function):
    """Rows of tokens; its gradient adds up a token's rows."""

    @staticmethod
    def forward(ctx, tokens, token_R, row_ZX):
        ctx.save_for_backward(row_ZX)
        return tokens.index_select(0, token_R)

    @staticmethod
    def backward(ctx, grad):
        return add_rows(grad, *ctx.saved_tensors), None, None


class _Collect(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx, rows, token_R, row_ZX):
        ctx.save_for_backward(token_R)
        return add_rows(rows, row_ZX)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, *ctx.saved_tensors), None, None


@Fused
def add_rows(rows: Tensor, row_ZX: Tensor) -> Tensor:
    """For each token the sum of its rows in their order, rounded once."""
    total = precise(rows[row_ZX[:, 0]])
    for nth in range(1, row_ZX.shape[1]):
        total = total + precise(rows[row_ZX[:, nth]])
    return total.to(rows.dtype)
