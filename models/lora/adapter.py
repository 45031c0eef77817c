"""The adapter of a model on this rank: two factors for every adapted matrix.

The factor that TP splits has its whole gradient on its rank. Of the other one every rank computes a part, which is
summed once a step (`Adapter.sum_parts`).
"""

# Megatron hangs attributes on parameters and modules.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isoloss.models.architecture import Architecture
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import Factors, adapter_map, leaves
from isoloss.models.lora.frozen import FrozenModel, Slot
from isoloss.models.lora.layer import LayerAdapter
from isoloss.models.lora.sharded import sharded
from isoloss.models.mcore.weight_stream import Named, Receives, stream_weights
from isoloss.models.model import LocalWeight, Model
from isoloss.models.weights.hf_checkpoint import WeightSource
from isoloss.models.weights.weight_map import OUTPUT
from isoloss.parallel import Mesh, UserError
from isoloss.parallel.collectives import gather_shards

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
    """An adapter of a frozen model on this rank: factors for every adapted matrix. The value head of a critic is
    trained with them.

    layers: adapters of layers with the modules that multiply by them.
    modules: the factors as modules, one for each of the model's chunks, to be wrapped and stepped.
    """

    def __init__(self, frozen: FrozenModel, lora: LoraConfig):
        """Make the factors, with uninitialised values. Raises UserError as `adapter_map`."""
        self._frozen, self.lora, self._is_off = frozen, lora, False
        model = frozen.model
        self._of_weight = {factors.base.name: factors for factors in adapter_map(model.arch, lora)}
        self.layers: list[tuple[Any, LayerAdapter]] = []
        self._layer_of: dict[int, LayerAdapter] = {}  # by the identity of the weight
        self.modules = [AdapterChunk(chunk.config, model.mesh) for chunk in model.modules]
        last = model.modules[-1]
        for base in model.owned():
            factors = self._of_weight.get(base.weight.name)
            if factors is not None and factors.of_output:
                continue
            chunk = self.modules[frozen.chunk_of.get(id(base.parameter), 0)]
            if factors is not None:
                self._adapt(chunk, frozen.module_of[id(base.parameter)], base, factors)
            elif base.weight.name == VALUE_HEAD and model.arch.critic:
                base.parameter.requires_grad_()
                chunk.add(base)
        output = self._of_weight.get(OUTPUT)
        if output is not None and last.post_process:
            # Of a tied matrix the embedding is the weight; what the adapter adds is of the output alone.
            first = model.mesh.dp_context.rank() == 0
            base = LocalWeight(output.base, last.output_weight(), model.mesh.tp, replica=False, first=first)
            self._adapt(self.modules[-1], last, base, output)

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
        layer = LayerAdapter(factors, a, b, part_O)
        self.layers.append((module, layer))
        if module.adapter is None:
            module.adapter = Slot(self._frozen)
        module.adapter.put(self, layer)
        self._layer_of[id(weight)] = layer

    # ---- what a checkpoint asks of it, as of a `Model` ---------------------------------------------------------------

    @property
    def frozen(self) -> FrozenModel:
        """Return the model under the adapter, which it shares with others."""
        return self._frozen

    @property
    def model(self) -> Model:
        return self._frozen.model

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
            "targets": sorted({name for factors in self._of_weight.values() for name in _targets(factors)}),
            "base": self._frozen.digest,
        }  # fmt: skip

    # ------------------------------------------------------------------------------------------------------------------

    def activate(self) -> None:
        """Let the model compute with this adapter; within `off` without one."""
        self._frozen.current = None if self._is_off else self

    def deactivate(self) -> None:
        """Let the model compute without an adapter."""
        self._frozen.current = None

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the model compute without an adapter for a while, whatever calls of the engine come meanwhile."""
        self._is_off = True
        self.deactivate()
        try:
            yield
        finally:
            self._is_off = False
            self.activate()

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return this rank's shard of a weight of the model with what the adapter adds, summed in fp64; the weight
        itself where nothing adapts it. Raises UserError for an adapted output matrix that is the embedding too. Enters
        no collective."""
        if OUTPUT in self._of_weight and self.arch.tie_embeddings:
            raise UserError(
                "lora.targets names lm_head, and this model's output matrix is its embedding as well, to which the "
                "adapter must not be added: use rollout.backend=megatron, or leave lm_head out"
            )
        layer = self._layer_of.get(id(weight))
        if layer is None:
            return weight.data
        return (weight.double() + layer.product()).to(weight.dtype)

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

    def stream(self, bucket_bytes: int, receives: Receives) -> Iterator[list[Named]]:
        """Every factor, whole, under its Hugging Face name, in buckets, on the ranks that `receives` names.

        Collective over the world: every rank exhausts the iterator. Factors of a tensor that holds all experts are not
        for streams.
        """
        return stream_weights(self._hf_factors(), self.model.device, bucket_bytes, receives)

    def _hf_factors(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield Hugging Face names and factors of this rank, and True where this rank of all is to send the factor.
        Collective over tp and etp."""
        for owned, whole in self.whole_tensors():
            if owned.weight.name == VALUE_HEAD:
                continue
            for part, tensor in zip(owned.weight.parts, owned.weight.mapping.split(whole)):
                assert part.row is None, part.tensor
                yield part.tensor, tensor, owned.first and owned.tp.rank() == 0

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


def _targets(factors: Factors) -> list[str]:
    """Return what a checkpoint calls the matrices of a weight. Experts that a router chooses share names with the MLPs
    around them, and may be adapted without them."""
    prefix = "" if factors.base.expert is None else "experts."
    return [prefix + leaf for leaf in leaves(factors.base)]


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
