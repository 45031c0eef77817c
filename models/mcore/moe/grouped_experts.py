"""All experts of a rank in one matrix product each way, on a GPU; its twin is Megatron's loop over them.

torch.nn.functional.grouped_mm (torch 2.10 or newer) multiplies rows that are sorted by expert with each expert's
matrix. Where an expert's rows end it reads on the device, so the host need not know. It takes bf16, and rows of a
multiple of 16 bytes. The weights stay parameters of their own, and are copied side by side for every product; so are
the factors of adapters (models/lora), which add two products each way.

Shape suffixes: R rows, D hidden size, I width of an expert (on this rank), E experts of this rank; N and K rows and
columns of any of their matrices, P columns of what lies between the factors of an adapter: its rank for each Hugging
Face tensor of the matrix.
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
        linears, tensors = zip(*(grouped_linear(modules) for modules in (inner, outer)))
        how = ends_E, again, empty, self._weighted, linears
        return _Experts.apply(rows_RD, weights_R, *how, *tensors[0], *tensors[1])


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
    def forward(ctx, rows_RD, weights_R, ends_E, again, empty, weighted, linears, *tensors):
        inner, outer = _with_tensors(linears, tensors)
        wide_RI = inner.forward(rows_RD, ends_E)
        output_RD = outer.forward(weighted.forward(wide_RI, weights_R), ends_E)
        ctx.save_for_backward(rows_RD, weights_R, ends_E, *(() if again else (wide_RI,)))
        ctx.linears, ctx.tensors, ctx.empty, ctx.weighted = linears, tensors, empty, weighted
        return output_RD

    @staticmethod
    def backward(ctx, grad_RD):
        rows_RD, weights_R, ends_E, *kept = ctx.saved_tensors
        inner, outer = _with_tensors(ctx.linears, ctx.tensors)
        grad_RD = grad_RD.contiguous()
        wide_RI = kept[0] if kept else inner.forward(rows_RD, ends_E, keep=True)
        grad_RI, between_outer = outer.backward(grad_RD, ends_E)
        active_RI, grad_weights_R = ctx.weighted.again(wide_RI, weights_R, grad_RI)
        grad_wide_RI = ctx.weighted.backward(wide_RI, weights_R, grad_RI)
        of_outer = outer.gradients(grad_RD, between_outer, active_RI, ends_E, ctx.empty)
        grad_rows_RD, between_inner = inner.backward(grad_wide_RI, ends_E)
        of_inner = inner.gradients(grad_wide_RI, between_inner, rows_RD, ends_E, ctx.empty)
        return grad_rows_RD, grad_weights_R, None, None, None, None, None, *of_inner, *of_outer


class Between(NamedTuple):
    """The form of an adapter. runs: rows of B and the columns, of P, that they are multiplied by. scale: of the
    product."""

    runs: Sequence[tuple[slice, slice]]
    scale: float


def grouped_linear(modules: Sequence[Any]) -> tuple[Between | None, list[Tensor]]:
    """Return the form of the active adapters of the experts' layers of one kind, and their tensors: weights; then
    factors A, and B."""
    weights = [module.weight for module in modules]
    adapters = [module.adapter and module.adapter.active for module in modules]
    if adapters[0] is None:
        return None, weights
    factors = [*(adapter.a for adapter in adapters), *(adapter.b for adapter in adapters)]
    return Between(adapters[0].runs, adapters[0].factors.scale), [*weights, *factors]


def _with_tensors(linears: Sequence[Between | None], tensors: Sequence[Tensor]) -> list["GroupedLinear"]:
    """Return the experts' layers of each kind. tensors: tensors of all, one kind after the other."""
    counts = [1 if between is None else 3 for between in linears]
    experts, left = len(tensors) // sum(counts), list(tensors)
    found = []
    for between, count in zip(linears, counts):
        mine, left = left[: count * experts], left[count * experts :]
        found.append(GroupedLinear(between, *(mine[k * experts : (k + 1) * experts] for k in range(count))))
    return found


class GroupedLinear:
    """A linear layer of every expert: weights [N, K], and of an adapter A [P, K] and B [N, rank]."""

    def __init__(
        self, between: Between | None, weights: Sequence[Tensor], a: Sequence[Tensor] = (), b: Sequence[Tensor] = ()
    ):
        self._weights, self._between, self._a, self._b = weights, between, a, b
        self._kept: Tensor | None = None

    def forward(self, rows_RK: Tensor, ends_E: Tensor, *, keep: bool = False) -> Tensor:
        """Return the outputs, [R, N]. keep: whether the stack of weights stays for `backward`."""
        weights_ENK = torch.stack(list(self._weights))
        output_RN = _times(rows_RK, weights_ENK.mT, ends_E)
        if self._between is not None:
            output_RN += _times(self._low(rows_RK, ends_E), self._b_ENP().mT, ends_E)
        if keep:
            self._kept = weights_ENK
        return output_RN

    def backward(self, grad_RN: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of the rows [R, K], and of what lies between the factors of an adapter, [R, P]."""
        weights_ENK, self._kept = torch.stack(list(self._weights)) if self._kept is None else self._kept, None
        grad_RK = _times(grad_RN, weights_ENK, ends_E)
        if self._between is None:
            return grad_RK, None
        between_RP = _times(grad_RN, self._b_ENP(), ends_E) * self._between.scale
        grad_RK += _times(between_RP, torch.stack(list(self._a)), ends_E)
        return grad_RK, between_RP

    def gradients(
        self,
        grad_RN: Tensor,
        between_RP: Tensor | None,
        rows_RK: Tensor,
        ends_E: Tensor,
        empty: Sequence[int] | None,
    ) -> list[Tensor | None]:
        """Return the gradients of the tensors of `grouped_linear`. between_RP: gradient, of `backward`."""
        of_weights = [*_of_matrices(grad_RN, rows_RK, ends_E, empty, self._weights)]
        if self._between is None or between_RP is None:
            return of_weights
        of_a = _of_matrices(between_RP, rows_RK, ends_E, empty, self._a)
        wide_ENP = _of_all(grad_RN, self._low(rows_RK, ends_E), ends_E, empty)
        of_b = torch.cat([wide_ENP[:, rows, columns] for rows, columns in self._between.runs], 1)
        return [*of_weights, *of_a, *of_b.unbind()]

    def _low(self, rows_RK: Tensor, ends_E: Tensor) -> Tensor:
        """Return the scaled products with A, [R, P]."""
        assert self._between is not None
        return _times(rows_RK, torch.stack(list(self._a)).mT, ends_E) * self._between.scale

    def _b_ENP(self) -> Tensor:
        """Return B with each row in the columns of its Hugging Face tensor."""
        assert self._between is not None
        rows_ENr = torch.stack(list(self._b))
        wide_ENP = rows_ENr.new_zeros(*rows_ENr.shape[:2], self._a[0].shape[0])
        for rows, columns in self._between.runs:
            wide_ENP[:, rows, columns] = rows_ENr[:, rows]
        return wide_ENP


def _times(rows: Tensor, matrices: Tensor, ends_E: Tensor) -> Tensor:
    """Every row by the matrix of its expert: [R, K] and [E, K, N] give [R, N]."""
    if not len(rows):  # a rank may get none, and no strides of an empty matrix are right
        return rows.new_zeros(0, matrices.shape[2])
    return grouped_mm(rows, matrices, offs=ends_E)


def _of_matrices(
    grad: Tensor, rows: Tensor, ends_E: Tensor, empty: Sequence[int] | None, matrices: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Return the gradients of the experts' matrices from output gradients [R, N] and input rows [R, K]: [E, N, K].

    Where Megatron keeps sums of gradients (`main_grad`) the gradients are added there, as by Megatron's own layers, and
    `grad_added_to_main_grad` is set.
    """
    if not matrices[0].requires_grad:
        return [None] * len(matrices)
    of_all = _of_all(grad, rows, ends_E, empty).unbind()
    if hasattr(matrices[0], "main_grad"):
        torch._foreach_add_([matrix.main_grad for matrix in matrices], list(of_all))
        for matrix in matrices:
            matrix.grad_added_to_main_grad = True
    return of_all


def _of_all(grad: Tensor, rows: Tensor, ends_E: Tensor, empty: Sequence[int] | None) -> Tensor:
    """Return the gradients of the experts' matrices, [E, N, K], as `_of_matrices`.

    An expert without rows gets 0. The product leaves there what was in the memory before, on some GPUs
    (pytorch/pytorch#172439). Where the host knows which they are, nothing passes over the gradients of the others.
    """
    if not len(rows):
        return grad.new_zeros(len(ends_E), grad.shape[1], rows.shape[1])
    of_all_ENK = grouped_mm(grad.mT, rows, offs=ends_E)
    if empty is None:
        of_all_ENK = without_empty(of_all_ENK, ends_E)
    for expert in empty or ():
        of_all_ENK[expert].zero_()
    return of_all_ENK


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
