"""Functions that are one kernel on a GPU, and op by op anywhere else.

torch.compile makes one kernel of pointwise ops, and of reductions over the last dimension: it reads every input and
writes every output once, and rounds only what it writes. The function itself is its twin. On a CPU nothing else runs,
so numbers there do not depend on a compiler.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


class Fused:
    """`function`, compiled where its first argument is on a GPU.

    function: of tensors first, all on one device, and of numbers; from and to tensors only, and without autograd: it
    is called inside of an autograd.Function, or without gradients.
    """

    def __init__(self, function: Function):
        functools.update_wrapper(self, function)
        self.op_by_op = function

    def __call__(self, first: Tensor, *more: Any) -> Any:
        return (self.compiled if first.is_cuda else self.op_by_op)(first, *more)

    @functools.cached_property
    def compiled(self) -> Function:
        return compiled(self.op_by_op)


def compiled(function: Function) -> Function:
    """One kernel for all sizes. A dry run, which has nothing to compile for, counts one in its place.

    What `cat` joins is made in its place, over the joined size: the compiler does so for a GPU of itself. A reduction
    over a part has no loop in common with it.
    """
    return torch.compile(function, fullgraph=True, dynamic=True, options={"force_pointwise_cat": True})


def precise(x: Tensor) -> Tensor:
    """In at least fp32: what a kernel computes in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
