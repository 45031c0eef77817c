"""Gated activations of an MLP: gate and up side by side in the last dimension, in the slot of Megatron's MLP."""

import torch
from torch import Tensor
from torch.nn.functional import silu


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, wide):
        ctx.save_for_backward(wide)
        gate, up = wide.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        (wide,) = ctx.saved_tensors
        gate, up = wide.chunk(2, dim=-1)
        grad_wide = torch.empty_like(wide)
        grad_gate, grad_up = grad_wide.chunk(2, dim=-1)
        torch.mul(silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward(grad * up, gate, grad_input=grad_gate)
        return grad_wide


def swiglu(wide: Tensor) -> Tensor:
    """silu(gate) * up (arXiv:2002.05202).

    Megatron's unfused one also adds a constant 0, keeps silu(gate) for the backward, and joins the two halves of the
    gradient by a copy. The result is the same, bit by bit.
    """
    return _SwiGLU.apply(wide)


def clamped_swiglu(wide: Tensor) -> Tensor:
    """gpt-oss's: gate * sigmoid(1.702 gate) * (up + 1), the gate clamped from above and up from both sides at 7."""
    gate, up = wide.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)
