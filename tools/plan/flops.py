"""Count multiplications and additions of an op by torch's registry, or here where it lacks or miscounts the op."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
# Matrix products of attention over segments: scores and output; in the backward scores again, and four gradients.
VARLEN_PRODUCTS = {aten._flash_attention_forward: 2, aten._flash_attention_backward: 5}


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping, out: Any) -> int | None:
    """Return the FLOPs of an op; None if it is no product. out: result of the op."""
    packet = func._overloadpacket
    if packet is aten._grouped_mm:
        return _grouped(*args[:2])
    if packet in VARLEN_PRODUCTS:
        return VARLEN_PRODUCTS[packet] * _of_segments(func, args, kwargs)
    if packet not in flop_registry:
        return None
    # The registry takes a dtype among the arguments of a product that adds for the shape of the output.
    shapes = [a for a in args if not isinstance(a, torch.dtype)]
    flops = flop_registry[packet](*shapes, **kwargs, out_val=out)
    # The registry counts attention square; causal attention is half of it.
    return flops // 2 if _argument(func, args, kwargs, "is_causal") else flops


def _grouped(rows: torch.Tensor, matrices: torch.Tensor) -> int:
    """Count rows times the matrix of their group, or groups of rows times each other: every row is in one group."""
    return 2 * rows.shape[0] * rows.shape[1] * matrices.shape[-1]


def _of_segments(func: Any, args: Sequence[Any], kwargs: Mapping) -> int:
    """Count one product of attention over segments. Only the device knows where they begin, so all count as equally
    long."""
    query, key, starts, longest, left = (
        _argument(func, args, kwargs, name) for name in ("query", "key", "cum_seq_q", "max_k", "window_size_left")
    )
    (queries, heads, width), segments = query.shape, starts.numel() - 1
    asking, length = -(-queries // segments), min(longest, -(-key.shape[0] // segments))
    if left is not None and left >= 0:
        seen = min(left + 1, length)
        pairs = asking * seen - seen * (seen - 1) // 2
    else:
        pairs = asking * length // (2 if _argument(func, args, kwargs, "is_causal") else 1)
    return 2 * pairs * segments * heads * width


def _argument(func: Any, args: Sequence[Any], kwargs: Mapping, name: str) -> Any:
    names = [argument.name for argument in func._schema.arguments]
    return (dict(zip(names, args)) | dict(kwargs)).get(name)
