"""Rotary position embedding (RoFormer, arXiv:2104.09864): pairs of channels turn by an angle that grows with position.

Cosines and sines are those of all layers, so a table has them once a row. The backward of a rotation is the rotation by
the negative angle: it keeps the table and nothing of its layer.

Letters: R tokens of this rank's slice of a packed row, H heads, D width of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from isoloss.parallel.ops.fused import Fused


def rotary_table(positions_R: Tensor, inv_freq: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Cosine and sine of each pair's angle, times `factor`: [R, 2, pairs]. Angles are fp32 in every precision."""
    angles = torch.outer(positions_R.to(torch.float32), inv_freq)
    return torch.stack([angles.cos() * factor, angles.sin() * factor], 1).to(dtype)


def rotate(x_RbHD: Tensor, table: Tensor, *, one_kernel: bool) -> Tensor:
    """Turn each of the first channels together with the one `pairs` further on; channels beyond 2 pairs stay. b is 1.

    In bf16 a table in fp32 loses less than one in bf16: the kernel rounds nothing but its result.
    """
    return _Rotation.apply(x_RbHD, table, (turn_halves, turn_halves_back), one_kernel)


def rotate_interleaved(x_RbHD: Tensor, table: Tensor, *, one_kernel: bool) -> Tensor:
    """Turn neighbours among the last 2 pairs channels. The result has all first channels of them, then all second ones
    (queries and keys alike, so no product of them notices). b is 1."""
    return _Rotation.apply(x_RbHD, table, (turn_neighbours, turn_neighbours_back), one_kernel)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, table, kernels, one_kernel):
        ctx.save_for_backward(table)
        forth, ctx.back = kernels if one_kernel else [kernel.op_by_op for kernel in kernels]
        return forth(x, table)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad, *ctx.saved_tensors), None, None, None


@Fused
def turn_halves(x: Tensor, table: Tensor) -> Tensor:
    pairs = table.shape[-1]
    return _joined([*_turned(x[..., :pairs], x[..., pairs : 2 * pairs], table), x[..., 2 * pairs :]], x.dtype)


@Fused
def turn_halves_back(grad: Tensor, table: Tensor) -> Tensor:
    pairs = table.shape[-1]
    turned = _turned_back(grad[..., :pairs], grad[..., pairs : 2 * pairs], table)
    return _joined([*turned, grad[..., 2 * pairs :]], grad.dtype)


@Fused
def turn_neighbours(x: Tensor, table: Tensor) -> Tensor:
    start = x.shape[-1] - 2 * table.shape[-1]
    return _joined([x[..., :start], *_turned(x[..., start::2], x[..., start + 1 :: 2], table)], x.dtype)


@Fused
def turn_neighbours_back(grad: Tensor, table: Tensor) -> Tensor:
    pairs = table.shape[-1]
    start = grad.shape[-1] - 2 * pairs
    turned = _turned_back(grad[..., start : start + pairs], grad[..., start + pairs :], table)
    return _joined([grad[..., :start], torch.stack(turned, -1).flatten(-2)], grad.dtype)


def _turned(first: Tensor, second: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = table[:, 0, None, None], table[:, 1, None, None]
    return first * cos - second * sin, second * cos + first * sin


def _turned_back(first: Tensor, second: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = table[:, 0, None, None], table[:, 1, None, None]
    return first * cos + second * sin, second * cos - first * sin


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([part for part in parts if part.shape[-1]], -1).to(dtype)
