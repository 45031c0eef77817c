"""Collectives over an explicit group. They are differentiable unless their docstring says otherwise, and collectives of
tensors are the identity on a group of one rank."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from torch import Tensor

Item = TypeVar("Item")


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send block j of `x`, [ranks, ...], to rank j; block j of the result is from rank j. One all-to-all each way."""
    return x if group.size() == 1 else mappings.all_to_all(group, x)


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate dim 0 over `group`; the gradient is summed and scattered (the exit of TP sequence parallelism)."""
    if group.size() == 1:
        return x
    return mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)


def gather_shards(shard: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return `shard` of every rank of the group, in rank order. Not differentiable. One all-gather."""
    if group.size() == 1:
        return [shard]
    shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def gather_objects(own: Item, group: dist.ProcessGroup | None = None) -> list[Item]:
    """Return `own` of every rank of the group (default: the world), in rank order. One all-gather, by pickle."""
    if dist.get_world_size(group) == 1:
        return [own]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def collect_objects(own: Item, group: dist.ProcessGroup) -> list[Item]:
    """Return `own` of every rank of the group on rank 0, in rank order, and [] on the other ranks.

    group: a group whose first rank is rank 0 of the world. One gather, by pickle.
    """
    if group.size() == 1:
        return [own]
    everyone: list[Any] = [None] * group.size()
    dist.gather_object(own, everyone if group.rank() == 0 else None, dst=0, group=group)
    return everyone if group.rank() == 0 else []


def pass_on(x: Tensor, group: dist.ProcessGroup, channel: int = 0) -> Callable[[], Tensor]:
    """Send `x` to the next rank of the group, and receive a tensor of the same shape from the previous rank.

    The call does not wait: the returned function waits, and returns the received tensor. Not differentiable.

    channel: number of a channel; messages on one channel keep their order.
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
        messages.clear()  # until here, the messages keep the sent tensor alive
        return arriving

    return wait


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may use the incoming gradient elsewhere
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sum_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x`, with its gradient summed over `group`: the entry of a region in which each rank adds a part.

    Megatron's own function, f, sums contiguous gradients only, and in place. One all-reduce in the backward.
    """
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
    """Sum the parts of all ranks, for a loss that all ranks compute alike: the exit of a TP region (Megatron's g).

    One all-reduce in the forward, none in the backward.
    """
    return x if group.size() == 1 else _SumParts.apply(x, group)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum `x` over all ranks, for losses that are summed over the ranks in turn.

    The loss of every rank reads the sum, so the gradient is summed too. One all-reduce each way.
    """
    return sum_parts(sum_gradient(x, group), group)
