"""Functions that run as one kernel on a GPU, and op by op on any other device.

torch.compile makes one kernel of pointwise ops and of reductions over the last dimension. The kernel reads every input
and writes every output once, and rounds only the outputs. The function itself is the kernel's twin. A CPU runs only the
function, so numbers on a CPU do not depend on a compiler.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


class Fused:
    """A function that is compiled for calls whose first argument is on a GPU.

    function: function from tensors, all on one device, and then numbers, to tensors. It must be called inside of an
        autograd.Function or without gradients.
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
    """Compile a function to one kernel for all sizes. A dry run replaces this function to count a kernel instead.

    Inputs of `cat` are computed directly into the result, over its whole size, which is the compiler's default for a
    GPU. So a reduction over one input cannot be fused with `cat`.
    """
    return torch.compile(function, fullgraph=True, dynamic=True, options={"force_pointwise_cat": True})


def precise(x: Tensor) -> Tensor:
    """Convert to at least fp32, the precision in which kernels compute."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
