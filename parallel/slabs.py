"""Rows that stay in a CPU's cache while several operations pass over them."""

from torch import Tensor

# At a time: 1 MiB in fp32, half of a common second-level cache.
CACHED_ELEMENTS = 1 << 18


def slabs(x_RX: Tensor) -> list[slice]:
    """Parts of its rows, in order. On a GPU all at once: an operation more costs more there."""
    rows, columns = x_RX.shape
    size = rows if x_RX.is_cuda else max(1, CACHED_ELEMENTS // max(columns, 1))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, max(size, 1))]
