"""A norm whose result is multiplied by the SiLU of a gate, in the output of Gated DeltaNet (arXiv:2412.06464).

On a GPU one kernel forth and one back. On a CPU, op by op over a few rows at a time. Both keep their inputs alone.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu

from isoloss.models.mcore.layers.norm import scale_of, through_norm, weight_gradient
from isoloss.parallel.ops.fused import Function, Fused, precise
from isoloss.parallel.ops.row_blocks import by_slabs


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, one_kernel: bool = True) -> Tensor:
    """norm(x) * weight * silu(gate), of the type of x. x, gate: [rows, heads, width]; each head is normed by itself."""
    return _GatedNorm.apply(x, gate, weight, eps, one_kernel)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, eps, one_kernel):
        ctx.save_for_backward(x, gate, weight)
        ctx.eps, ctx.one_kernel = eps, one_kernel
        forth = gated_norm_forward if one_kernel else gated_norm_forward.op_by_op
        return by_slabs(lambda x, gate: (forth(x, gate, weight, eps),), x, gate)[0]

    @staticmethod
    def backward(ctx, grad):
        x, gate, weight = ctx.saved_tensors
        back = gated_norm_backward if ctx.one_kernel else gated_norm_backward.op_by_op
        back = partial(_with_gradient_of_weight, back, weight, ctx.eps)
        grad_x, grad_gate, grad_weight = by_slabs(back, grad, x, gate)
        grad_weight = grad_weight[0] if len(grad_weight) == 1 else grad_weight.sum(0)
        return grad_x, grad_gate, grad_weight, None, None


def _with_gradient_of_weight(
    back: Function, weight: Tensor, eps: float, grad: Tensor, x: Tensor, gate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """That of the weight with a row for these rows, as others have one of their own."""
    grad_x, grad_gate, grad_normed, scale = back(grad, x, gate, weight, eps)
    return grad_x, grad_gate, weight_gradient(grad_normed, x, weight, scale)[None]


@Fused
def gated_norm_forward(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (precise(x) * scale_of(x, eps) * precise(weight) * silu(precise(gate))).to(x.dtype)


@Fused
def gated_norm_backward(
    grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, of the gate and of the norm, and what each head was multiplied by."""
    scale, open_, grad_precise = scale_of(x, eps), precise(gate), precise(grad)
    grad_normed = grad_precise * silu(open_)
    grad_opened = grad_precise * (precise(x) * scale * precise(weight))
    grad_gate = torch.ops.aten.silu_backward(grad_opened, open_)
    grad_x = through_norm(grad_normed, x, weight, scale, 0.0)
    return grad_x.to(x.dtype), grad_gate.to(gate.dtype), grad_normed.to(x.dtype), scale
