"""The residual stream before an MLP, and its norm: on a GPU attention's output is added and the sum normed in one pass.

Megatron has a slot for each, one behind the other. Here both are one module's: in the first it computes what both are
to give, in the second it hands out the rest.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from torch import Tensor

from isoloss.models.mcore.layers.norm import RMSNorm, scale_of, through_norm, weight_gradient
from isoloss.parallel.ops.fused import Fused, precise


class ResidualNorm(RMSNorm):
    """The norm of a sum; of one that `add` made on a GPU, it is computed already."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._computed: tuple[Tensor, Tensor] | None = None  # from `add` to the norm that follows it

    def add(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """Return the addition for Megatron's slot of bias, dropout and residual stream. Dropout is 0 (`build`)."""
        one_by_one = get_bias_dropout_add(training, fused)

        def added(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_and_bias
            if not on_gpu(output):
                return one_by_one(output_and_bias, residual, dropout)
            # By a call of the module: where parameters arrive while layers run, its hooks wait for the weight.
            total, normed = self(output if bias is None else output + bias, residual)
            self._computed = total, normed
            return total

        return added

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """The norm of x. With `residual`: the sum of both, and its norm."""
        if residual is not None:
            return _AddAndNorm.apply(x, residual, self.weight, self.eps, self.offset)
        if self._computed is None:
            return super().forward(x)
        (total, normed), self._computed = self._computed, None
        assert total is x
        return normed


def on_gpu(hidden: Tensor) -> bool:
    return hidden.is_cuda


class _AddAndNorm(torch.autograd.Function):
    """Keeps the sum and one number a row, as torch's norm does."""

    @staticmethod
    def forward(ctx, output, residual, weight, eps, offset):
        total, normed, scale = add_and_norm(output, residual, weight, eps, offset)
        ctx.save_for_backward(total, weight, scale)
        ctx.offset = offset
        return total, normed

    @staticmethod
    def backward(ctx, grad_total, grad_normed):
        total, weight, scale = ctx.saved_tensors
        grad = add_and_norm_backward(grad_normed, grad_total, total, weight, scale, ctx.offset)
        return grad, grad, weight_gradient(grad_normed, total, weight, scale), None, None


@Fused
def add_and_norm(
    output: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, its norm, and what each row was multiplied by. The norm is of the sum before it is rounded."""
    total = precise(output) + residual
    scale = scale_of(total, eps)
    return total.to(output.dtype), (total * scale * (precise(weight) + offset)).to(output.dtype), scale


@Fused
def add_and_norm_backward(
    grad_normed: Tensor, grad_total: Tensor, total: Tensor, weight: Tensor, scale: Tensor, offset: float
) -> Tensor:
    """The gradient of both summands: what comes along the residual stream, and what comes through the norm."""
    return (grad_total + through_norm(grad_normed, total, weight, scale, offset)).to(total.dtype)
