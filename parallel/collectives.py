"""Collectives over an explicit group, differentiable where they say nothing else. Every one of tensors is the identity
on a group of one rank."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from torch import Tensor

Item = TypeVar("Item")


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x: [ranks, ...]; block j goes to rank j, block j of the result came from rank j. One all-to-all each way."""
    return x if group.size() == 1 else mappings.all_to_all(group, x)


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate dim 0 over `group`; the gradient is summed and scattered (the exit of TP sequence parallelism)."""
    if group.size() == 1:
        return x
    return mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)


def gather_shards(shard: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """`shard` of every rank of the group, in their order; not differentiable. One all-gather."""
    if group.size() == 1:
        return [shard]
    shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def gather_objects(mine: Item, group: dist.ProcessGroup | None = None) -> list[Item]:
    """`mine` of every rank of the group (default: the world), in their order. One all-gather, by pickle."""
    if dist.get_world_size(group) == 1:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def collect_objects(mine: Item, group: dist.ProcessGroup) -> list[Item]:
    """`mine` of every rank of a group whose first rank is 0, in their order, there; nothing on the others. One gather,
    by pickle."""
    if group.size() == 1:
        return [mine]
    everyone: list[Any] = [None] * group.size()
    dist.gather_object(mine, everyone if group.rank() == 0 else None, dst=0, group=group)
    return everyone if group.rank() == 0 else []


def pass_on(x: Tensor, group: dist.ProcessGroup, channel: int = 0) -> Callable[[], Tensor]:
    """Send `x` to the next rank of the group and receive as much from the one before, without waiting; not
    differentiable. The returned function waits, and gives what arrived.

    channel: messages on one keep their order.
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
    """Identity whose gradient is summed over `group`: entry of a region where each rank adds a part. Megatron's own, f,
    sums contiguous gradients only, and those in place."""
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
