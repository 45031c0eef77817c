"""Adapters of low rank inside of linear layers.

A layer computes its adapter before its own collective. So what the adapter adds is in the parallel state of the layer's
product, whatever that is: gathered, a shard, or a part of a sum; and forward and backward enter no further collective.
The factor that TP splits has its whole gradient on its rank. Of the other one every rank computes a part, which is
summed once a step (`Adapter.sum_parts`).

Shape suffixes: R rows of tokens, I inputs and O outputs of a matrix on this rank, r rank of the adapter, P Hugging Face
tensors in the matrix.
"""

# Megatron hangs attributes on parameters and modules.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isoloss.models.architecture import Architecture
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import Factors, adapter_map, leaves
from isoloss.models.lora.sharded import sharded
from isoloss.models.model import LocalWeight, Model
from isoloss.models.weights.hf_checkpoint import WeightSource
from isoloss.parallel import Mesh
from isoloss.parallel.collectives import gather_shards
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
    """

    factors: Factors
    a: nn.Parameter
    b: nn.Parameter
    part_O: Tensor
    _runs: list[tuple[slice, slice]] = field(init=False)

    def __post_init__(self):
        rank, start, runs = self.factors.rank, 0, []
        for part, rows in groupby(self.part_O.tolist()):
            stop = start + len(list(rows))
            runs.append((slice(start, stop), slice(part * rank, (part + 1) * rank)))
            start = stop
        self._runs = runs
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
        if len(self._runs) > self._parts:  # the tensors' rows alternate, as those of heads
            add_product(out_RO, low, self._spread(b).T)
            return
        for rows, columns in self._runs:
            add_product(out_RO[:, rows], low[:, columns], b[rows].T)

    def back(self, grad_RO: Tensor, b: Tensor) -> Tensor:
        """Return the gradient of `low`, [R, P*r]."""
        if len(self._runs) > self._parts:
            return product(grad_RO, self._spread(b))
        return torch.cat([product(grad_RO[:, rows], b[rows]) for rows, _ in self._runs], 1)

    def gradient_of_b(self, grad_RO: Tensor, low: Tensor) -> Tensor:
        if len(self._runs) > self._parts:
            wide = product(grad_RO.T, low).unflatten(1, (self._parts, -1))
            return wide[self._place_O, self.part_O]
        return torch.cat([product(grad_RO[:, rows].T, low[:, columns]) for rows, columns in self._runs], 0)

    def _spread(self, b: Tensor) -> Tensor:
        """Return B as [O, P*r], with each row in the columns of its tensor."""
        wide = b.new_zeros(len(b), self._parts, b.shape[1])
        wide[self._place_O, self.part_O] = b
        return wide.flatten(1)


VALUE_HEAD = "output_layer.weight"  # of a critic


class AdapterChunk(nn.Module):
    """The factors of a chunk of the model, by the names of the adapter map.

    config: Megatron's configuration of the model.
    owned: the factors and what they are parts of.
    """

    def __init__(self, config: Any, mesh: Mesh):
        super().__init__()
        self.config, self._mesh = config, mesh
        self.owned: list[LocalWeight] = []

    def add(self, owned: LocalWeight) -> None:
        factor = owned.parameter
        assert isinstance(factor, nn.Parameter)
        self.owned.append(owned)
        *path, last = owned.weight.name.split(".")
        module: nn.Module = self
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(last, factor)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """Return the sharded factors in the form of Megatron's checkpoints."""
        assert not sharded_offsets
        del metadata
        return {f"{prefix}{owned.weight.name}": sharded(owned, self._mesh) for owned in self.owned}


class Adapter:
    """An adapter of a model on this rank: factors for every adapted matrix. The model is frozen, but for the value head
    of a critic, which is trained with them.

    base: fingerprint of the model's weights, for checkpoints.
    layers: adapters of layers with the modules that multiply by them.
    modules: the factors as modules, one for each of the model's chunks, to be wrapped and stepped.
    """

    def __init__(self, model: Model, lora: LoraConfig):
        """Make the factors, with uninitialised values. Raises UserError as `adapter_map`."""
        self.model, self.lora, self.base = model, lora, ""
        for tensor in model.tensors():
            tensor.requires_grad_(False)
        self._of_weight = {factors.base.name: factors for factors in adapter_map(model.arch, lora)}
        self.layers: list[tuple[Any, LayerAdapter]] = []
        modules = model.modules
        owners = {id(module._parameters.get("weight")): module for chunk in modules for module in chunk.modules()}
        chunk_of = {id(parameter): index for index, chunk in enumerate(modules) for parameter in chunk.parameters()}
        self.modules = [AdapterChunk(chunk.config, model.mesh) for chunk in modules]
        for base in model.owned():
            factors = self._of_weight.get(base.weight.name)
            chunk = self.modules[chunk_of.get(id(base.parameter), 0)]
            if factors is not None:
                self._adapt(chunk, owners[id(base.parameter)], base, factors)
            elif base.weight.name == VALUE_HEAD and model.arch.critic:
                base.parameter.requires_grad_()
                chunk.add(base)

    def _adapt(self, chunk: AdapterChunk, module: Any, base: LocalWeight, factors: Factors) -> None:
        tp_size, tp_rank, weight = base.tp.size(), base.tp.rank(), base.parameter
        part_O = factors.part_of_rows(tp_size, tp_rank)
        inputs, rank, parts = weight.shape[1], factors.rank, len(factors.base.parts)
        a = nn.Parameter(weight.new_empty(parts * rank, inputs))
        b = nn.Parameter(weight.new_empty(weight.shape[0], rank))
        split_a, split_b = factors.row_parallel, not factors.row_parallel and not factors.replicated
        _mark(a, base, dim=1 if split_a else None)
        _mark(b, base, dim=0 if split_b else None)
        for factor, described in ((a, factors.a), (b, factors.b)):
            chunk.add(LocalWeight(described, factor, base.tp, replica=False, first=base.first))
        self.layers.append((module, LayerAdapter(factors, a, b, part_O)))

    # ---- what a checkpoint asks of it, as of a `Model` ---------------------------------------------------------------

    @property
    def arch(self) -> Architecture:
        return self.model.arch

    @property
    def mesh(self) -> Mesh:
        return self.model.mesh

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def adapter_record(self) -> Mapping[str, Any]:
        """Return what a checkpoint says of the adapter, and has to say where it is loaded: plain values."""
        lora = self.lora
        return {
            "rank": lora.rank, "alpha": lora.alpha, "scaling": lora.scaling, "expert_rank": lora.expert_rank,
            "targets": sorted({leaf for factors in self._of_weight.values() for leaf in leaves(factors.base)}),
            "base": self.base,
        }  # fmt: skip

    # ------------------------------------------------------------------------------------------------------------------

    def activate(self) -> None:
        """Let the model compute with this adapter."""
        for module, layer in self.layers:
            module.adapter = layer

    def deactivate(self) -> None:
        """Let the model compute without an adapter."""
        for module, _ in self.layers:
            module.adapter = None

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the model compute without an adapter for a while."""
        self.deactivate()
        try:
            yield
        finally:
            self.activate()

    def owned(self) -> list[LocalWeight]:
        """Every parameter of this rank that is trained, in the order of the model."""
        return [owned for chunk in self.modules for owned in chunk.owned]

    @torch.no_grad()
    def load(self, source: WeightSource) -> None:
        """Fill the factors. No collectives."""
        for owned in self.owned():
            if owned.weight.name == VALUE_HEAD:
                continue
            whole = source.whole(owned.weight)
            owned.parameter.copy_(owned.weight.mapping.shard(whole, owned.tp.size(), owned.tp.rank()))

    def whole_tensors(self, of: Callable[[Tensor], Tensor] = lambda p: p.data) -> Iterator[tuple[LocalWeight, Tensor]]:
        """Every parameter of this rank that is trained, whole, as `Model.whole_tensors`. Collective over tp and etp."""
        for owned in self.owned():
            yield owned, owned.weight.mapping.unshard(gather_shards(of(owned.parameter), owned.tp))

    def sum_parts(self) -> None:
        """Sum the gradients of which every TP rank has computed a part, in Megatron's buffers, after they were reduced
        over data-parallel ranks. Collectives: one all-reduce over tp and one over etp, where these have several ranks.
        """
        of_group: dict[dist.ProcessGroup, list[Tensor]] = {}
        for owned in self.owned():
            if owned.tp.size() > 1 and self._has_parts(owned):
                of_group.setdefault(owned.tp, []).append(owned.parameter.main_grad)
        for group, gradients in of_group.items():
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=group)
            for gradient, summed in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
                gradient.copy_(summed.view_as(gradient))

    def _has_parts(self, owned: LocalWeight) -> bool:
        """Return whether ranks of TP compute parts of this factor's gradient. Where they have the whole matrix, they
        compute the same, unless each sees its own tokens."""
        factors = self._of_weight.get(base_name(owned.weight.name))
        if factors is None:  # a value head, of which every rank has its own columns
            return False
        if factors.replicated:
            return self.model.mesh.layout.sequence_parallel
        split = factors.a if factors.row_parallel else factors.b
        return owned.weight != split


def base_name(factor: str) -> str:
    """Return the name of the weight that a factor adapts."""
    return f"{factor.rsplit('.', 1)[0]}.weight"


def _mark(factor: nn.Parameter, base: LocalWeight, *, dim: int | None) -> None:
    """Set what Megatron reads of a parameter. dim: dimension that TP splits; None: TP ranks hold copies."""
    expert = base.weight.expert is not None
    factor.allreduce = not expert
    factor.sequence_parallel = False  # `sum_parts` sums its parts, with sequence parallelism and without
    # Of copies the gradient norm counts that of the first TP rank. TP ranks of experts hold other experts, so all
    # count, but for copies over etp.
    factor.tensor_model_parallel = dim is not None or expert
    factor.partition_dim, factor.partition_stride = dim or 0, 1
    if expert and dim is None and base.tp.rank() > 0:
        factor.shared = True
