"""Rows that stay in a CPU's cache while several operations pass over them."""

from collections.abc import Callable

import torch
from torch import Tensor

# At a time: 1 MiB in fp32, half of a common second-level cache.
CACHED_ELEMENTS = 1 << 18


def slabs(x_RX: Tensor) -> list[slice]:
    """Parts of its rows, in order. On a GPU all at once: an operation more costs more there."""
    rows, columns = x_RX.shape
    size = rows if x_RX.is_cuda else max(1, CACHED_ELEMENTS // max(columns, 1))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, max(size, 1))]


def by_slabs(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """What `function` gives for each slab of tensors with the same rows, one behind the other."""
    parts = slabs(tensors[0].flatten(1))
    if len(parts) <= 1:
        return function(*tensors)
    return tuple(map(torch.cat, zip(*(function(*(t[part] for t in tensors)) for part in parts))))
