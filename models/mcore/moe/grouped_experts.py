"""All experts of a rank in one matrix product each way, on a GPU; its twin is Megatron's loop over them.

torch.nn.functional.grouped_mm (torch 2.10 or newer) multiplies rows that are sorted by expert with each expert's
matrix. Where an expert's rows end it reads on the device, so the host need not know. It takes bf16, and rows of a
multiple of 16 bytes. The weights stay parameters of their own, and are copied side by side for every product.

Shape suffixes: R rows, D hidden size, I width of an expert (on this rank), E experts of this rank; N and K rows and
columns of any of their matrices.
"""

# Megatron hangs attributes on parameters.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, silu

from isoloss.models.mcore.layers.activations import gelu_factor, gelu_slope
from isoloss.parallel.ops.fused import Fused, precise

ALIGNED = 8  # bf16 numbers in 16 bytes


class LocalExperts(SequentialMLP):
    """Megatron's experts of a rank, one after the other.

    weighted: the kernels of their activation, with which `at_once` may do the same, where `on_gpu`; None: it may not.
    """

    local_experts: Any

    def __init__(self, *args: Any, weighted: "Weighted | None", **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._weighted = weighted
        self.grouped = weighted is not None and _fits(self.local_experts[0])

    def forward(self, rows_RD: Tensor, tokens_per_expert: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.grouped and on_gpu(rows_RD):
            ends_E = tokens_per_expert.cumsum(0).to(rows_RD.device, torch.int32, non_blocking=True)
            return self.at_once(rows_RD, weights_R, ends_E, again=False), None
        return super().forward(rows_RD, tokens_per_expert, weights_R)

    def at_once(
        self,
        rows_RD: Tensor,
        weights_R: Tensor,
        ends_E: Tensor,
        *,
        again: bool,
        empty: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the weighted outputs, [R, D].

        rows_RD: sorted by expert.
        weights_R: weight of each row.
        ends_E: end of each expert's rows, int32 on the device.
        again: recomputation of gate and up in the backward, instead of keeping them.
        empty: experts without rows; None: unknown to the host.
        """
        inner = [expert.linear_fc1 for expert in self.local_experts]
        outer = [expert.linear_fc2 for expert in self.local_experts]
        wait_for_weights(*inner, *outer)
        matrices = [module.weight for module in (*inner, *outer)]
        return _Experts.apply(rows_RD, weights_R, ends_E, again, empty, self._weighted, *matrices)


def wait_for_weights(*modules: nn.Module) -> None:
    """Wait for weights that a forward pass reads without calling their module. After a step they may still be in flight
    from other ranks (engine/step/optimizer.py, `Gather`), and a module's forward pre-hook waits for its own."""
    for module in modules:
        for hook in module._forward_pre_hooks.values():
            hook(module, ())


def on_gpu(hidden: Tensor) -> bool:
    return hidden.is_cuda and hidden.dtype == torch.bfloat16


def _fits(expert: Any) -> bool:
    """No biases, and rows that the product can be given."""
    fc1, fc2 = expert.linear_fc1, expert.linear_fc2
    widths = (*fc1.weight.shape, *fc2.weight.shape)
    return fc1.bias is None and fc2.bias is None and not any(width % ALIGNED for width in widths)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, weights_R, ends_E, again, empty, weighted, *matrices):
        inner, outer = _halves(matrices)
        wide_RI = _times(rows_RD, torch.stack(inner).mT, ends_E)
        output_RD = _times(weighted.forward(wide_RI, weights_R), torch.stack(outer).mT, ends_E)
        ctx.save_for_backward(rows_RD, weights_R, ends_E, *(() if again else (wide_RI,)))
        ctx.matrices, ctx.empty, ctx.weighted = matrices, empty, weighted
        return output_RD

    @staticmethod
    def backward(ctx, grad_RD):
        rows_RD, weights_R, ends_E, *kept = ctx.saved_tensors
        inner, outer = _halves(ctx.matrices)
        inner_ENK, grad_RD = torch.stack(inner), grad_RD.contiguous()
        wide_RI = kept[0] if kept else _times(rows_RD, inner_ENK.mT, ends_E)
        grad_RI = _times(grad_RD, torch.stack(outer), ends_E)
        active_RI, grad_weights_R = ctx.weighted.again(wide_RI, weights_R, grad_RI)
        grad_wide_RI = ctx.weighted.backward(wide_RI, weights_R, grad_RI)
        of_outer = _of_matrices(grad_RD, active_RI, ends_E, ctx.empty, outer)
        of_inner = _of_matrices(grad_wide_RI, rows_RD, ends_E, ctx.empty, inner)
        grad_rows_RD = _times(grad_wide_RI, inner_ENK, ends_E)
        return grad_rows_RD, grad_weights_R, None, None, None, None, *of_inner, *of_outer


def _halves(matrices: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    count = len(matrices) // 2
    return matrices[:count], matrices[count:]


def _times(rows: Tensor, matrices: Tensor, ends_E: Tensor) -> Tensor:
    """Every row by the matrix of its expert: [R, K] and [E, K, N] give [R, N]."""
    if not len(rows):  # a rank may get none, and no strides of an empty matrix are right
        return rows.new_zeros(0, matrices.shape[2])
    return grouped_mm(rows, matrices, offs=ends_E)


def _of_matrices(
    grad: Tensor, rows: Tensor, ends_E: Tensor, empty: Sequence[int] | None, matrices: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Return the gradients of the experts' matrices from output gradients [R, N] and input rows [R, K]: [E, N, K].

    An expert without rows gets 0. The product leaves there what was in the memory before, on some GPUs
    (pytorch/pytorch#172439). Where the host knows which they are, nothing passes over the gradients of the others.
    Where Megatron keeps sums of gradients (`main_grad`) the gradients are added there, as by Megatron's own layers, and
    `grad_added_to_main_grad` is set.
    """
    if not matrices[0].requires_grad:
        return [None] * len(matrices)
    if len(rows):
        of_all_ENK = grouped_mm(grad.mT, rows, offs=ends_E)
        if empty is None:
            of_all_ENK = without_empty(of_all_ENK, ends_E)
        for expert in empty or ():
            of_all_ENK[expert].zero_()
        of_all = of_all_ENK.unbind()
    else:
        of_all = [torch.zeros_like(matrix) for matrix in matrices]
    if hasattr(matrices[0], "main_grad"):
        torch._foreach_add_([matrix.main_grad for matrix in matrices], list(of_all))
        for matrix in matrices:
            matrix.grad_added_to_main_grad = True
    return of_all


@Fused
def without_empty(gradients_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """0 where an expert had no rows."""
    starts_E = torch.nn.functional.pad(ends_E[:-1], (1, 0))
    return torch.where((ends_E > starts_E)[:, None, None], gradients_ENK, 0)


@Fused
def weighted_swiglu(wide_RI: Tensor, weights_R: Tensor) -> Tensor:
    """silu(gate) * up * weight, rounded once; gate and up are the halves of a row."""
    gate_RI, up_RI = precise(wide_RI).chunk(2, dim=-1)
    return (silu(gate_RI) * up_RI * precise(weights_R)[:, None]).to(wide_RI.dtype)


@Fused
def weighted_swiglu_again(wide_RI: Tensor, weights_R: Tensor, grad_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Recompute the output of `weighted_swiglu`, and in the same loop the gradient of the weights. The gradient of gate
    and up runs over both, and is a kernel of its own."""
    width = grad_RI.shape[1]  # of one name for the compiler, which else makes a loop of each
    gate_RI, up_RI = precise(wide_RI[:, :width]), precise(wide_RI[:, width:])
    return _weighted(silu(gate_RI) * up_RI, weights_R, grad_RI)


def _weighted(active_RI: Tensor, weights_R: Tensor, grad_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows times their weights, and the gradient of the weights. A part of a kernel."""
    output_RI = (active_RI * precise(weights_R)[:, None]).to(grad_RI.dtype)
    return output_RI, (precise(grad_RI) * active_RI).sum(1).to(weights_R.dtype)


@Fused
def weighted_swiglu_backward(wide_RI: Tensor, weights_R: Tensor, grad_RI: Tensor) -> Tensor:
    """The gradient of gate and up."""
    gate_RI, up_RI = precise(wide_RI).chunk(2, dim=-1)
    sigmoid_RI = gate_RI.sigmoid()
    weighted_RI = precise(grad_RI) * precise(weights_R)[:, None]
    grad_gate_RI = weighted_RI * up_RI * sigmoid_RI * (1 + gate_RI * (1 - sigmoid_RI))
    return torch.cat([grad_gate_RI, weighted_RI * gate_RI * sigmoid_RI], -1).to(wide_RI.dtype)


@Fused
def weighted_geglu(wide_RI: Tensor, weights_R: Tensor) -> Tensor:
    """Return gelu(gate) * up * weight, rounded once, with GELU's approximation by tanh."""
    gate_RI, up_RI = precise(wide_RI).chunk(2, dim=-1)
    return (gate_RI * gelu_factor(gate_RI) * up_RI * precise(weights_R)[:, None]).to(wide_RI.dtype)


@Fused
def weighted_geglu_again(wide_RI: Tensor, weights_R: Tensor, grad_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `weighted_swiglu_again` does, for `weighted_geglu`."""
    width = grad_RI.shape[1]
    gate_RI, up_RI = precise(wide_RI[:, :width]), precise(wide_RI[:, width:])
    return _weighted(gate_RI * gelu_factor(gate_RI) * up_RI, weights_R, grad_RI)


@Fused
def weighted_geglu_backward(wide_RI: Tensor, weights_R: Tensor, grad_RI: Tensor) -> Tensor:
    """Return the gradient of gate and up."""
    gate_RI, up_RI = precise(wide_RI).chunk(2, dim=-1)
    factor_RI = precise(grad_RI) * gelu_factor(gate_RI)
    grad_gate_RI = (factor_RI + factor_RI * gelu_slope(gate_RI)) * up_RI
    # The weights come last: a compiler makes two kernels of more inputs to `cat`.
    grad_wide_RI = torch.cat([grad_gate_RI, factor_RI * gate_RI], -1) * precise(weights_R)[:, None]
    return grad_wide_RI.to(wide_RI.dtype)


class Weighted(NamedTuple):
    """A gated activation of rows, times the weight of each, and its gradients."""

    forward: Fused
    again: Fused
    backward: Fused


WEIGHTED = {
    "swiglu": Weighted(weighted_swiglu, weighted_swiglu_again, weighted_swiglu_backward),
    "geglu": Weighted(weighted_geglu, weighted_geglu_again, weighted_geglu_backward),
}
