"""Matrix products that add to what is there, and the buffers that they add to.

On a CPU torch takes them from Intel's MKL, which keeps its kernels for AVX-512 to Intel's own processors. oneDNN, which
torch has as well, has them for all: where `onednn_is_faster`, it takes half the time.

x, y, z: any.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isoloss.parallel.ops.prepacked import onednn_linear

CPUINFO = Path("/proc/cpuinfo")
# A product of oneDNN's is new memory, and fresh pages cost as much as a pass over them: so many elements at a time.
NEW_ELEMENTS = 1 << 22
# Of the rows that a product adds up: beyond them oneDNN slows down where one of the matrices is transposed.
SUMMED_ROWS = 1024


@cache
def onednn_is_faster() -> bool:
    """Than MKL, for fp32 on this machine's CPU."""
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not both or not torch.backends.cpu.get_cpu_capability().startswith("AVX512") or not CPUINFO.is_file():
        return False
    vendors = [line for line in CPUINFO.read_text(encoding="utf-8").splitlines() if line.startswith("vendor_id")]
    return bool(vendors) and "GenuineIntel" not in vendors[0]


def _by_onednn(left_xz: Tensor, right_zy: Tensor) -> bool:
    """oneDNN takes no empty matrices."""
    fp32 = left_xz.dtype == right_zy.dtype == torch.float32
    return fp32 and left_xz.is_cpu and onednn_is_faster() and 0 not in (*left_xz.shape, *right_zy.shape)


def _onednn(left_xz: Tensor, right_zy: Tensor) -> Tensor:
    """left @ right, as new memory. A right matrix that is a part of one may take a thousand times as long. A left one
    that is not contiguous is copied in any case: here, where a dry run counts it."""
    if right_zy.stride() != (1, right_zy.shape[0]):
        right_zy = right_zy.contiguous()
    return onednn_linear(left_xz.contiguous(), right_zy.T)


def _summands(left_xz: Tensor, right_zy: Tensor) -> Iterator[Tensor]:
    """[x, y], whose sum is left @ right: the products of blocks, or one where to add many would take longer."""
    if left_xz.shape[0] * right_zy.shape[1] > NEW_ELEMENTS:
        yield _onednn(right_zy.T, left_xz.T).T
    else:
        yield from map(_onednn, left_xz.split(SUMMED_ROWS, dim=1), right_zy.split(SUMMED_ROWS))


def product(left_xz: Tensor, right_zy: Tensor, out_xy: Tensor | None = None) -> Tensor:
    """left @ right, [x, y], of one type. Not differentiable. out_xy: memory for it."""
    if not _by_onednn(left_xz, right_zy):
        return torch.mm(left_xz, right_zy, out=out_xy)
    if left_xz.stride(0) == 1 and left_xz.shape[1] > SUMMED_ROWS:
        out_xy = left_xz.new_empty((left_xz.shape[0], right_zy.shape[1])) if out_xy is None else out_xy
        add_product(out_xy, left_xz, right_zy, keep=False)
        return out_xy
    if out_xy is None:
        return _onednn(left_xz, right_zy)
    columns = max(1, NEW_ELEMENTS // left_xz.shape[0])
    for right_zn, out_xn in zip(right_zy.split(columns, dim=1), out_xy.split(columns, dim=1)):
        out_xn.copy_(_onednn(left_xz, right_zn))
    return out_xy


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
    """sum += left @ right, within the product: no tensor in between, and nothing is rounded but the sum. With oneDNN
    there is one in between, of the same type.

    sum_xy: with rows without gaps; of the type of the other two, or fp32 where they have 16 bits.
    keep: False: what was there is overwritten, whatever it was.
    """
    beta = int(keep)
    if sum_xy.dtype == torch.float32 and sum_xy.is_cpu:  # which has no products of 16-bit numbers that add up in fp32
        left_xz, right_zy = left_xz.float(), right_zy.float()  # they are exact in it
    if _by_onednn(left_xz, right_zy):
        for summand_xy in _summands(left_xz, right_zy):
            (sum_xy.add_ if keep else sum_xy.copy_)(summand_xy)
            keep = True
    elif sum_xy.dtype == left_xz.dtype:
        torch.addmm(sum_xy, left_xz, right_zy, beta=beta, out=sum_xy)
    else:
        # It reads and writes the same memory, as `addmm_` does, which wants one type of all three. A sum in another
        # type than the factors' is taken from torch 2.10 on.
        torch.addmm(sum_xy, left_xz, right_zy, beta=beta, out_dtype=sum_xy.dtype, out=sum_xy)
