"""Differentiable collectives over an explicit group. Every one is the identity on a group of one rank."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """all-to-all of the leading dimension: out[j] on rank i is x[i] of rank j."""
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx, grad):
        # The exchange is a permutation of blocks over the ranks and its own inverse, hence its own transpose.
        return _exchange(grad, ctx.group), None


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x: [ranks, ...]; block j goes to rank j, block j of the result came from rank j. One all-to-all each way."""
    return x if group.size() == 1 else _AllToAll.apply(x, group)


def pass_on(x: Tensor, group: dist.ProcessGroup, channel: int = 0) -> Callable[[], Tensor]:
    """Send `x` to the next rank of the group and receive as much from the one before, without waiting; not
    differentiable. The returned function waits, and gives what arrived. channel: messages on one keep their order.
    """
    x, arriving = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    if group.size() == 1:
        return lambda: x
    rank, size = group.rank(), group.size()
    messages = [
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size, tag=channel),
        dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % size, tag=channel),
    ]
    works = dist.batch_isend_irecv(messages)

    def wait() -> Tensor:
        for work in works:
            work.wait()
        messages.clear()  # until here they keep what is being sent alive
        return arriving

    return wait


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may hold the incoming one elsewhere
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sum_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Identity whose gradient is summed over `group`: entry of a region where each rank adds a part (Megatron's f)."""
    return x if group.size() == 1 else _SumGradient.apply(x, group)


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        del ctx
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def sum_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of every rank's part, for a loss that all ranks compute alike: the exit of a TP region (Megatron's g)."""
    return x if group.size() == 1 else _SumParts.apply(x, group)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of every rank's `x`, for losses that are themselves summed over the ranks: every rank's loss reads it, so
    the gradient is summed as well. One all-reduce each way."""
    return sum_parts(sum_gradient(x, group), group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate dim 0 over `group`; the gradient is summed and scattered (the exit of TP sequence parallelism)."""
    return x if group.size() == 1 else _GatherRows.apply(x, group)
