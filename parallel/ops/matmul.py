"""Matrix products that add to a buffer, and Megatron's buffers for gradients.

On a CPU, torch calls Intel's MKL, which uses its AVX-512 kernels on Intel's own processors only. oneDNN, which is also
part of torch, uses such kernels on all processors: where `onednn_is_faster`, it takes half the time.

Shape suffixes: x, y, z any sizes.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isoloss.parallel.ops.prepacked import onednn_linear

CPUINFO = Path("/proc/cpuinfo")
# Elements of a product of oneDNN at a time: it allocates its result, and fresh pages cost as much as a pass over them.
NEW_ELEMENTS = 1 << 22
# Rows that one product sums over: with more, oneDNN slows down if one of the matrices is transposed.
SUMMED_ROWS = 1024


@cache
def onednn_is_faster() -> bool:
    """Return True if oneDNN is faster than MKL for fp32 on this machine's CPU."""
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not both or not torch.backends.cpu.get_cpu_capability().startswith("AVX512") or not CPUINFO.is_file():
        return False
    vendors = [line for line in CPUINFO.read_text(encoding="utf-8").splitlines() if line.startswith("vendor_id")]
    return bool(vendors) and "GenuineIntel" not in vendors[0]


def _by_onednn(left_xz: Tensor, right_zy: Tensor) -> bool:
    """Return True if oneDNN computes this product; it accepts no empty matrices."""
    fp32 = left_xz.dtype == right_zy.dtype == torch.float32
    return fp32 and left_xz.is_cpu and onednn_is_faster() and 0 not in (*left_xz.shape, *right_zy.shape)


def _onednn(left_xz: Tensor, right_zy: Tensor) -> Tensor:
    """Compute left @ right as new memory."""
    # A right matrix that is a view of part of a matrix may take a thousand times as long.
    if right_zy.stride() != (1, right_zy.shape[0]):
        right_zy = right_zy.contiguous()
    # oneDNN copies a left matrix that is not contiguous in any case; a copy here is counted by a dry run.
    return onednn_linear(left_xz.contiguous(), right_zy.T)


def _summands(left_xz: Tensor, right_zy: Tensor) -> Iterator[Tensor]:
    """Yield matrices [x, y] whose sum is left @ right: products of blocks, or one product if sums take longer."""
    if left_xz.shape[0] * right_zy.shape[1] > NEW_ELEMENTS:
        yield _onednn(right_zy.T, left_xz.T).T
    else:
        yield from map(_onednn, left_xz.split(SUMMED_ROWS, dim=1), right_zy.split(SUMMED_ROWS))


def product(left_xz: Tensor, right_zy: Tensor, out_xy: Tensor | None = None) -> Tensor:
    """Compute left @ right, [x, y], for matrices of one type. Not differentiable. out_xy: memory for the result."""
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
    """Return Megatron's buffer for the gradient of a module's weight if the backward must add to it, else None.

    A 16-bit buffer also gives None, because adding each chunk of a row would round it many times.
    """
    if not getattr(module, "gradient_accumulation_fusion", False):
        return None
    main_grad = getattr(module.weight, "main_grad", None)
    return main_grad if main_grad is not None and main_grad.dtype in (torch.float32, torch.float64) else None


def added_to_main_grad(weight: Any) -> Tensor:
    """Mark the gradient of a weight as added to Megatron's buffer; return uninitialized memory for autograd.

    Autograd's gradient wakes Megatron's hook, which skips a marked weight.
    """
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def add_product(sum_xy: Tensor, left_xz: Tensor, right_zy: Tensor, *, keep: bool = True) -> None:
    """Compute sum += left @ right inside of the product, so that only the sum is rounded and no temporary exists.

    With oneDNN there is a temporary of the same type.

    sum_xy: buffer with contiguous rows, of the type of the factors, or in fp32 for 16-bit factors.
    keep: False overwrites the buffer, whatever it contains, NaN included.
    """
    beta = int(keep)
    if sum_xy.dtype == torch.float32 and sum_xy.is_cpu:  # a CPU cannot sum products of 16-bit numbers in fp32
        left_xz, right_zy = left_xz.float(), right_zy.float()  # exact
    if _by_onednn(left_xz, right_zy):
        for summand_xy in _summands(left_xz, right_zy):
            (sum_xy.add_ if keep else sum_xy.copy_)(summand_xy)
            keep = True
    elif sum_xy.dtype == left_xz.dtype:
        torch.addmm(sum_xy, left_xz, right_zy, beta=beta, out=sum_xy)
    else:
        # Like `addmm_`, this call reads and writes the same memory, but `addmm_` requires one type of all three. Torch
        # accepts a sum of another type than the factors from 2.10 on.
        torch.addmm(sum_xy, left_xz, right_zy, beta=beta, out_dtype=sum_xy.dtype, out=sum_xy)


class WeightGradient:
    """The gradient of the output matrix, added to main_grad_VD, or summed in a buffer of its own for autograd."""

    def __init__(self, weight_VD: Tensor, columns: int, main_grad_VD: Tensor | None, dtype: torch.dtype):
        self._weight_VD, self._columns, self._direct = weight_VD, columns, main_grad_VD is not None
        self._sum_VD = torch.empty_like(weight_VD, dtype=dtype) if main_grad_VD is None else main_grad_VD
        self._written = self._direct

    def add(self, grad_MV: Tensor, hidden_MD: Tensor) -> None:
        sum_vD, written = self._sum_VD[: self._columns], self._written
        self._written = True
        if sum_vD.dtype == grad_MV.dtype or grad_MV.is_cuda or self._direct:
            add_product(sum_vD, grad_MV.T, hidden_MD, keep=written)
        elif written:
            sum_vD += grad_MV.T @ hidden_MD
        else:
            sum_vD.copy_(grad_MV.T @ hidden_MD)

    def of_autograd(self) -> Tensor:
        """Return the gradient for autograd, which has no meaning if the gradient was added to main_grad_VD."""
        if self._direct:
            return added_to_main_grad(self._weight_VD)
        self._sum_VD[self._columns if self._written else 0 :] = 0
        return self._sum_VD.to(self._weight_VD.dtype)
