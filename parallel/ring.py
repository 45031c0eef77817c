"""Ring attention (arXiv:2310.01889) over packed rows: keys and values go round, queries stay.

Shape suffixes as in `block_attention`. The tokens that this rank of the ring holds, zigzag (`sequence`), have both
roles: they are the Q that it asks with, and the Y whose keys it owns.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.collectives import pass_on
from isoloss.parallel.ops.block_attention import attend, attend_backward
from isoloss.parallel.ops.mask_blocks import Block, blocks_of
from isoloss.parallel.ops.prefix_tree import PrefixTree
from isoloss.parallel.ops.varlen import VarlenCache


@dataclass(frozen=True)
class _Ring:
    """What all steps of a layer's ring have in common."""

    forest: PrefixTree
    group: dist.ProcessGroup
    scale: float
    window: int | None
    uploads: VarlenCache
    flash: bool

    def blocks(self, step: int) -> tuple[Block, ...]:
        """What is left to see after `step` passes; the keys at hand then began `step` ranks before this one."""
        size, rank = self.group.size(), self.group.rank()
        return blocks_of(self.forest, size, rank, (rank - step) % size, self.window)


def ring_attention(
    query_QHD: Tensor,
    key_YKD: Tensor,
    value_YKU: Tensor,
    forest: PrefixTree,
    uploads: VarlenCache,
    group: dist.ProcessGroup,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    *,
    flash: bool = True,
) -> Tensor:
    """Causal attention within each document of a row that is split zigzag over `group`, which may be one rank with the
    whole row. Returns [Q, H, U].

    forest: the documents of the *whole* row; uploads: of that row.
    scale, window, sinks_H, flash: see `attention.Heads`.
    The next keys and values are on their way while those at hand are attended to. Nothing but this rank's own inputs
    and output is kept for the backward, in which keys and values go round once more, their gradients behind them.
    Collectives: size - 1 messages to the next rank in the forward, 2 size - 1 in the backward.
    """
    ring = _Ring(forest, group, scale, window, uploads, flash)
    return _RingAttention.apply(query_QHD, key_YKD, value_YKU, sinks_H, ring)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks_H, ring: _Ring):
        own, widths, last = (key, value), (key.shape[2], value.shape[2]), ring.group.size() - 1
        pair = _join(key, value) if last else None
        seen = None
        for step in range(last + 1):
            arriving = None if pair is None or step == last else pass_on(pair, ring.group)
            seen = attend(query, key, value, ring.blocks(step), ring.scale, ring.uploads, seen, flash=ring.flash)
            if arriving is not None:
                pair = arriving()
                key, value = pair.split(widths, dim=2)
        assert seen is not None
        out, lse = seen
        if sinks_H is not None:  # one more logit of each head, whose value is zero
            own_lse, lse = lse, torch.logaddexp(lse, sinks_H.to(lse.dtype))
            out = out * (own_lse - lse).exp()[..., None]
        out = out.to(query.dtype)
        ctx.save_for_backward(query, *own, sinks_H, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, sinks_H, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        last = ring.group.size() - 1
        pair, widths = _join(key, value) if last else None, (key.shape[2], value.shape[2])
        grad_query = gathered = None
        for step in range(last + 1):
            arriving = None if pair is None or step == last else pass_on(pair, ring.group)
            step_grad_query, grad_key, grad_value = attend_backward(
                grad, query, key, value, out, lse, ring.blocks(step), ring.scale, ring.uploads, flash=ring.flash
            )
            if last:
                grad_query = step_grad_query.to(lse.dtype) if grad_query is None else grad_query.add_(step_grad_query)
                grad_pair = _join(grad_key.to(lse.dtype), grad_value.to(lse.dtype))
                if gathered is not None:
                    grad_pair += gathered()
                # Behind their keys, on a channel of their own; the last pass brings them home.
                gathered = pass_on(grad_pair, ring.group, channel=1)
            else:
                grad_query = step_grad_query
            if arriving is not None:
                pair = arriving()
                key, value = pair.split(widths, dim=2)
        assert grad_query is not None
        if gathered is not None:
            grad_key, grad_value = gathered().split(widths, dim=2)
        grad_sinks = None
        if sinks_H is not None:
            delta_QH = (grad * out).sum(-1, dtype=lse.dtype)
            grad_sinks = -((sinks_H.to(lse.dtype) - lse).exp() * delta_QH).sum(0).to(sinks_H.dtype)
        grads = (t.to(query.dtype) for t in (grad_query, grad_key, grad_value))
        return *grads, grad_sinks, None


def _join(key_YKD: Tensor, value_YKU: Tensor) -> Tensor:
    """Keys and values, or their gradients, as one message."""
    return torch.cat([key_YKD, value_YKU], dim=2)
