"""Blocks of rows that stay in a CPU's cache while several operations pass over them."""

from collections.abc import Callable

import torch
from torch import Tensor

# Elements of a block: 1 MiB in fp32, half of a common second-level cache.
CACHED_ELEMENTS = 1 << 18


def slabs(x_RX: Tensor) -> list[slice]:
    """Cut the rows of a matrix into blocks, in order. A GPU gets one block: more operations cost more there."""
    rows, columns = x_RX.shape
    size = rows if x_RX.is_cuda else max(1, CACHED_ELEMENTS // max(columns, 1))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, max(size, 1))]


def by_slabs(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply `function` to each block of tensors with the same rows, and concatenate each of its results."""
    parts = slabs(tensors[0].flatten(1))
    if len(parts) <= 1:
        return function(*tensors)
    return tuple(map(torch.cat, zip(*(function(*(t[part] for t in tensors)) for part in parts))))
