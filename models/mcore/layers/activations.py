"""Gated activations of an MLP: gate and up side by side in the last dimension, in the slot of Megatron's MLP.

On a GPU each is one kernel forth and one back, which rounds nothing but its result; on a CPU, op by op.
"""

import math
from collections.abc import Mapping
from functools import partial

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import gelu, silu

from isoloss.models.kinds.kind import Activation
from isoloss.models.mcore.layer_config import LayerConfig
from isoloss.parallel.ops.fused import Fused, precise
from isoloss.parallel.ops.row_blocks import slabs

# Of the gate and of its cube in twice what GELU's approximation takes the tanh of.
GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715 * GELU_LINEAR


def swiglu(wide: Tensor, *, one_kernel: bool = True) -> Tensor:
    """silu(gate) * up (arXiv:2002.05202).

    Megatron's unfused one also adds a constant 0, keeps silu(gate) for the backward, and joins the two halves of the
    gradient by a copy. On a CPU the result is the same, bit by bit.
    """
    if one_kernel and wide.is_cuda:
        return InOneKernel.apply(wide, swiglu_forward, swiglu_backward)
    return _InSlabs.apply(wide, silu, torch.ops.aten.silu_backward)


def geglu(wide: Tensor, *, one_kernel: bool = True) -> Tensor:
    """gelu(gate) * up (arXiv:2002.05202), with GELU's approximation by tanh."""
    if one_kernel and wide.is_cuda:
        return InOneKernel.apply(wide, geglu_forward, geglu_backward)
    gelu_backward = partial(torch.ops.aten.gelu_backward, approximate="tanh")
    return _InSlabs.apply(wide, partial(gelu, approximate="tanh"), gelu_backward)


def clamped_swiglu(wide: Tensor, *, one_kernel: bool = True) -> Tensor:
    """gpt-oss's: gate * sigmoid(1.702 gate) * (up + 1), the gate clamped from above and up from both sides at 7."""
    if one_kernel and wide.is_cuda:
        return InOneKernel.apply(wide, clamped_swiglu_forward, clamped_swiglu_backward)
    gate, up = wide.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


class _InSlabs(torch.autograd.Function):
    """A gated activation computed in slabs. backward_of_gate: gradient of the gate, given that of its activation."""

    @staticmethod
    def forward(ctx, wide, activation, backward_of_gate):
        ctx.save_for_backward(wide)
        ctx.activation, ctx.backward_of_gate = activation, backward_of_gate
        out = wide.new_empty((*wide.shape[:-1], wide.shape[-1] // 2))
        rows, out_rows = wide.flatten(0, -2), out.flatten(0, -2)
        for slab in slabs(rows):
            gate, up = rows[slab].chunk(2, dim=-1)
            torch.mul(activation(gate), up, out=out_rows[slab])
        return out

    @staticmethod
    def backward(ctx, grad):
        (wide,) = ctx.saved_tensors
        grad_wide = torch.empty_like(wide, memory_format=torch.contiguous_format)
        rows, grad_rows, grads = (x.flatten(0, -2) for x in (wide, grad_wide, grad))
        for slab in slabs(rows):
            gate, up = rows[slab].chunk(2, dim=-1)
            grad_gate, grad_up = grad_rows[slab].chunk(2, dim=-1)
            torch.mul(ctx.activation(gate), grads[slab], out=grad_up)
            ctx.backward_of_gate(grads[slab] * up, gate, grad_input=grad_gate)
        return grad_wide, None, None


class InOneKernel(torch.autograd.Function):
    """A gated activation in one kernel each way. forth: function of gate and up. back: gradient of `forth`."""

    @staticmethod
    def forward(ctx, wide, forth, back):
        ctx.save_for_backward(wide)
        ctx.back = back
        return forth(wide)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(*ctx.saved_tensors, grad), None, None


@Fused
def swiglu_forward(wide: Tensor) -> Tensor:
    gate, up = precise(wide).chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up).to(wide.dtype)


@Fused
def swiglu_backward(wide: Tensor, grad: Tensor) -> Tensor:
    gate, up = precise(wide).chunk(2, dim=-1)
    open_, grad_precise = gate.sigmoid(), precise(grad)
    grad_gate = grad_precise * up * open_ * (1 + gate * (1 - open_))
    return torch.cat([grad_gate, grad_precise * gate * open_], -1).to(wide.dtype)


@Fused
def geglu_forward(wide: Tensor) -> Tensor:
    gate, up = precise(wide).chunk(2, dim=-1)
    return (gate * gelu_factor(gate) * up).to(wide.dtype)


@Fused
def geglu_backward(wide: Tensor, grad: Tensor) -> Tensor:
    gate, up = precise(wide).chunk(2, dim=-1)
    grad_open = precise(grad) * gelu_factor(gate)
    return torch.cat([grad_open * up * (1 + gelu_slope(gate)), grad_open * gate], -1).to(wide.dtype)


def gelu_factor(gate: Tensor) -> Tensor:
    """GELU's factor (1 + tanh(y)) / 2, as a sigmoid: the sum would cancel far below 0. A part of a kernel."""
    return torch.sigmoid(gate * (GELU_LINEAR + GELU_CUBIC * gate * gate))


def gelu_slope(gate: Tensor) -> Tensor:
    """Return the derivative of GELU's factor times gate / factor. A part of a kernel."""
    square = gate * gate
    return gate * (GELU_LINEAR + 3 * GELU_CUBIC * square) * (1 - gelu_factor(gate))


@Fused
def clamped_swiglu_forward(wide: Tensor) -> Tensor:
    gate, up = precise(wide).chunk(2, dim=-1)
    gate = gate.clamp(max=7.0)
    return (gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)).to(wide.dtype)


@Fused
def clamped_swiglu_backward(wide: Tensor, grad: Tensor) -> Tensor:
    """No gradient goes through what is beyond its clamp, as in torch's."""
    gate, up = precise(wide).chunk(2, dim=-1)
    clamped, grad_precise = gate.clamp(max=7.0), precise(grad)
    open_ = torch.sigmoid(1.702 * clamped)
    grad_gate = grad_precise * (up.clamp(-7.0, 7.0) + 1) * open_ * (1 + 1.702 * clamped * (1 - open_))
    grad_up = grad_precise * clamped * open_
    return torch.cat([grad_gate * (gate <= 7.0), grad_up * (up.abs() <= 7.0)], -1).to(wide.dtype)


class SwiGLU(MegatronModule):
    """`swiglu` as a module, which 0.17 demands in the slot of an activation. Built from the configuration; it has no
    parameters, and Megatron asks it, like its neighbours, what it adds to a checkpoint."""

    config: LayerConfig

    def forward(self, wide: Tensor) -> Tensor:
        return swiglu(wide, one_kernel=self.config.kernels.activation)


class ClampedSwiGLU(SwiGLU):
    """`clamped_swiglu` as a module."""

    def forward(self, wide: Tensor) -> Tensor:
        return clamped_swiglu(wide, one_kernel=self.config.kernels.activation)


class GeGLU(SwiGLU):
    """`geglu` as a module."""

    def forward(self, wide: Tensor) -> Tensor:
        return geglu(wide, one_kernel=self.config.kernels.activation)


ACTIVATIONS: Mapping[Activation, type[MegatronModule]] = {
    "swiglu": SwiGLU, "clamped_swiglu": ClampedSwiGLU, "geglu": GeGLU,
}  # fmt: skip
