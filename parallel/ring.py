"""Ring attention (arXiv:2310.01889) over packed rows: keys and values go round, queries stay.

Shape suffixes as in `block_attention`. A rank of the ring holds zigzag chunks of the row (`sequence`). These tokens are
Q where the rank computes with their queries, and Y where it is the owner of their keys and values.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.collectives import pass_on
from isoloss.parallel.ops.block_attention import Heads, attend, attend_backward
from isoloss.parallel.ops.flash_attention import Attended
from isoloss.parallel.ops.mask_blocks import Block, blocks_of
from isoloss.parallel.ops.prefix_tree import PrefixTree
from isoloss.parallel.ops.varlen import VarlenCache


@dataclass(frozen=True)
class _Ring:
    """The inputs that all steps of a layer's ring share."""

    forest: PrefixTree
    uploads: VarlenCache
    group: dist.ProcessGroup
    heads: Heads

    def blocks(self, step: int) -> tuple[Block, ...]:
        """Return the blocks after `step` passes, when this rank has the keys of the rank `step` before it."""
        size, rank = self.group.size(), self.group.rank()
        return blocks_of(self.forest, size, rank, (rank - step) % size, self.heads.window)


def ring_attention(
    query_QHD: Tensor,
    key_YKD: Tensor,
    value_YKU: Tensor,
    forest: PrefixTree,
    uploads: VarlenCache,
    group: dist.ProcessGroup,
    heads: Heads,
) -> Tensor:
    """Compute causal attention within each document of a row that is split zigzag over `group`, [Q, H, U].

    forest: documents of the whole row, also where a rank holds a part of it.
    uploads: tensors on the device that all layers of the row share.
    group: process group of the ring; a group of one rank holds the whole row.
    Collectives: size - 1 messages to the next rank in the forward, 2 size - 1 in the backward.
    """
    return _RingAttention.apply(query_QHD, key_YKD, value_YKU, heads.sinks_H, _Ring(forest, uploads, group, heads))


class _RingAttention(torch.autograd.Function):
    """Saves for the backward only this rank's own inputs and output. The backward passes keys and values round again,
    followed by their gradients."""

    @staticmethod
    def forward(ctx, query, key, value, sinks_H, ring: _Ring):
        own, widths, last = (key, value), (key.shape[2], value.shape[2]), ring.group.size() - 1
        pair = _join(key, value) if last else None
        seen = None
        for step in range(last + 1):
            # The next keys and values are in flight while attention to the present ones is computed.
            arriving = None if pair is None or step == last else pass_on(pair, ring.group)
            seen = attend(query, key, value, ring.blocks(step), ring.heads, ring.uploads, seen)
            if arriving is not None:
                pair = arriving()
                key, value = pair.split(widths, dim=2)
        assert seen is not None
        out, lse = seen
        if sinks_H is not None:  # a sink is one more logit of its head, with a value of zero
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
                grad, Attended(query, key, value, out, lse), ring.blocks(step), ring.heads, ring.uploads
            )
            if last:
                grad_query = step_grad_query.to(lse.dtype) if grad_query is None else grad_query.add_(step_grad_query)
                grad_pair = _join(grad_key.to(lse.dtype), grad_value.to(lse.dtype))
                if gathered is not None:
                    grad_pair += gathered()
                # Gradients follow their keys on a second channel; the last pass returns them to the owner.
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
    """Concatenate keys and values, or their gradients, to one message, [Y, K, D + U]."""
    return torch.cat([key_YKD, value_YKU], dim=2)
