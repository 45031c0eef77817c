"""Products of linear layers with an adapter of low rank.

A layer computes its adapter before its own collective. So what the adapter adds is in the parallel state of the layer's
product, whatever that is: gathered, a shard, or a part of a sum; and forward and backward enter no further collective.

Shape suffixes: R rows of tokens, I inputs and O outputs of a matrix on this rank, r rank of the adapter, P Hugging Face
tensors in the matrix.
"""

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isoloss.models.lora.factors import Factors
from isoloss.parallel.ops.matmul import add_product, product


class AdaptedProduct(torch.autograd.Function):
    """x W^T + bias + scale * (x A^T) B^T for a frozen W, with the collectives of the base's product alone.

    gathers: x is a slice of the sequence, which the group's ranks gather (Megatron's sequence parallelism).
    reduces: the gradient of x is summed over the group.
    """

    @staticmethod
    def forward(ctx, x, weight_OI, bias_O, a, b, layer: "LayerAdapter", gathers: bool, reduces: bool, group):
        rows = (_gathered(x, group)[0] if gathers else x).flatten(0, -2)
        low = product(rows, a.T).mul_(layer.factors.scale)
        out = product(rows, weight_OI.T)
        layer.add(out, low, b)
        if bias_O is not None:
            out += bias_O
        # Of a gathered x the slice is kept, and gathered again: activations stay as small as without an adapter.
        ctx.save_for_backward(x, weight_OI, a, b, low)
        ctx.layer, ctx.gathers, ctx.reduces, ctx.group = layer, gathers, reduces, group
        length = x.shape[0] * (group.size() if gathers else 1)
        return out.view(length, *x.shape[1:-1], out.shape[1])

    @staticmethod
    def backward(ctx, grad_output):
        x, weight_OI, a, b, low = ctx.saved_tensors
        layer: LayerAdapter = ctx.layer
        whole, arriving = _gathered(x, ctx.group, wait=False) if ctx.gathers else (x, None)
        grad_RO = grad_output.flatten(0, -2)
        grad_low = layer.back(grad_RO, b).mul_(layer.factors.scale)
        grad_x, leaving = None, None
        if ctx.needs_input_grad[0]:
            grad_rows = product(grad_RO, weight_OI)
            add_product(grad_rows, grad_low, a)
            grad_x = grad_rows.view(whole.shape)
            if ctx.gathers:
                summed, grad_x = grad_x, torch.empty_like(x)
                leaving = dist.reduce_scatter_tensor(grad_x, summed, group=ctx.group, async_op=True)
            elif ctx.reduces:
                leaving = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        if arriving is not None:
            arriving.wait()
        grad_b = layer.gradient_of_b(grad_RO, low)
        grad_a = product(grad_low.T, whole.flatten(0, -2))
        if leaving is not None:
            leaving.wait()
        return grad_x, None, None, grad_a, grad_b, None, None, None, None


def _gathered(x: Tensor, group: dist.ProcessGroup, *, wait: bool = True) -> tuple[Tensor, Any]:
    """Return the slices of all ranks, and the collective that brings them unless it was waited for."""
    whole = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    work: Any = dist.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=True)
    if wait:
        work.wait()
    return whole, work


@dataclass(eq=False)
class LayerAdapter:
    """The factors of one linear layer on this rank, and their products.

    a, b: [P*r, I] and [O, r].
    part_O: number of the Hugging Face tensor of each row of B.
    runs: rows of B, and the columns of what A makes that they are multiplied by.
    """

    factors: Factors
    a: nn.Parameter
    b: nn.Parameter
    part_O: Tensor
    runs: list[tuple[slice, slice]] = field(init=False)

    def __post_init__(self):
        rank, start, runs = self.factors.rank, 0, []
        for part, rows in groupby(self.part_O.tolist()):
            stop = start + len(list(rows))
            runs.append((slice(start, stop), slice(part * rank, (part + 1) * rank)))
            start = stop
        self.runs = runs
        self._parts = len(self.factors.base.parts)
        self._place_O = torch.arange(len(self.part_O), device=self.b.device)
        self.part_O = self.part_O.to(self.b.device)

    def multiply(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> Tensor:
        """Compute what Megatron's layer computes with these arguments, with the adapter. options: its others, which are
        about gradients of the weight."""
        assert not weight.requires_grad and (bias is None or not bias.requires_grad), "an adapter's base is frozen"
        del options
        return AdaptedProduct.apply(
            input, weight, bias, self.a, self.b, self, sequence_parallel, allreduce_dgrad, tp_group
        )

    @torch.no_grad()
    def add_to(self, output: Tensor, x: Tensor) -> Tensor:
        """Add what the adapter makes of x, without gradients, to the layer's own product: for generation."""
        self.add(output.flatten(0, -2), product(x.flatten(0, -2), self.a.T).mul_(self.factors.scale), self.b)
        return output

    def add(self, out_RO: Tensor, low: Tensor, b: Tensor) -> None:
        """Add the products of low [R, P*r] with the rows of B: those of a tensor with the columns of its A."""
        if len(self.runs) > self._parts:  # the tensors' rows alternate, as those of heads
            add_product(out_RO, low, self._spread(b).T)
            return
        for rows, columns in self.runs:
            add_product(out_RO[:, rows], low[:, columns], b[rows].T)

    def product(self) -> Tensor:
        """Return what the adapter adds to this rank's weight, [O, I] fp64."""
        added = self.b.new_zeros(len(self.b), self.a.shape[1], dtype=torch.float64)
        for rows, columns in self.runs:
            added[rows] = self.b[rows].double() @ self.a[columns].double()
        return added * self.factors.scale

    def back(self, grad_RO: Tensor, b: Tensor) -> Tensor:
        """Return the gradient of `low`, [R, P*r]."""
        if len(self.runs) > self._parts:
            return product(grad_RO, self._spread(b))
        return torch.cat([product(grad_RO[:, rows], b[rows]) for rows, _ in self.runs], 1)

    def gradient_of_b(self, grad_RO: Tensor, low: Tensor) -> Tensor:
        if len(self.runs) > self._parts:
            wide = product(grad_RO.T, low).unflatten(1, (self._parts, -1))
            return wide[self._place_O, self.part_O]
        return torch.cat([product(grad_RO[:, rows].T, low[:, columns]) for rows, columns in self.runs], 0)

    def _spread(self, b: Tensor) -> Tensor:
        """Return B as [O, P*r], with each row in the columns of its tensor."""
        wide = b.new_zeros(len(b), self._parts, b.shape[1])
        wide[self._place_O, self.part_O] = b
        return wide.flatten(1)
