"""Collectives of tensors that views made: expanded, transposed; runs on every rank."""

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.collectives import sum_gradient, sum_parts


def gradient_of_a_region(view: str) -> Tensor:
    """The gradient [2, 3] of the entry of a region in which rank r multiplies by r + 1, in the strides of `view`."""
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    inside, factor = sum_gradient(x, dist.group.WORLD), dist.get_rank() + 1
    if view == "product":
        inside = inside * factor
    if view == "transposed":
        inside = inside.T * factor * torch.arange(6, dtype=torch.float64).view(3, 2)
    inside.sum().backward()  # of an expanded one the gradient is one number, with strides of 0
    assert x.grad is not None
    return x.grad


def parts(transposed: bool) -> tuple[Tensor, Tensor]:
    """What rank r gave, r + 1 everywhere, after the sum; and the sum."""
    mine = torch.full((3, 2), dist.get_rank() + 1.0)
    mine = mine.T if transposed else mine
    return mine, sum_parts(mine, dist.group.WORLD)
