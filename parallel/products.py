"""Matrix products that add to what is there, and the buffers that they add to."""

from typing import Any

import torch
from torch import Tensor, nn


def main_grad_to_add_to(module: nn.Module) -> Tensor | None:
    """Megatron's buffer for the gradient of a module's weight, where the module is told to add to it itself. Not a
    buffer of 16 bits, which would be rounded by each chunk of a row, and not once."""
    if not getattr(module, "gradient_accumulation_fusion", False):
        return None
    main_grad = getattr(module.weight, "main_grad", None)
    return main_grad if main_grad is not None and main_grad.dtype in (torch.float32, torch.float64) else None


def added_to_main_grad(weight: Any) -> Tensor:
    """What autograd is given for a gradient that was added to Megatron's buffer already: memory without meaning, which
    wakes Megatron's hook. The hook is told to pass over it."""
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def add_product(sum_xy: Tensor, left_xz: Tensor, right_zy: Tensor, *, keep: bool = True) -> None:
    """sum += left @ right, within the product: no tensor in between, and nothing is rounded but the sum.

    sum_xy: with rows without gaps; of the type of the other two, or fp32 where they have 16 bits. x, y, z: any.
    keep: False: what was there is overwritten, whatever it was.
    """
    beta = int(keep)
    if sum_xy.dtype == left_xz.dtype:
        torch.addmm(sum_xy, left_xz, right_zy, beta=beta, out=sum_xy)
    elif left_xz.is_cuda:
        # It reads and writes the same memory, as `addmm_` does, which wants one type of all three. A sum in another
        # type than the factors' is taken from torch 2.10 on.
        torch.addmm(sum_xy, left_xz, right_zy, beta=beta, out_dtype=sum_xy.dtype, out=sum_xy)
    else:  # a CPU has no such product; those of 16-bit numbers are exact in fp32
        sum_xy.addmm_(left_xz.to(sum_xy.dtype), right_zy.to(sum_xy.dtype), beta=beta)
