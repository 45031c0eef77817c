"""Matrix products that add to what is there."""

import torch
from torch import Tensor


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
