"""The model of a run, as one noun: what training, generation and files ask of it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.weight import Weight
from isoloss.models.mcore.build import build_chunks
from isoloss.models.mcore.gpt import PackedGPT, unwrap
from isoloss.models.mcore.kernels import Kernels
from isoloss.models.mcore.layer_config import PLAIN, BuildOptions
from isoloss.models.mcore.stages import stage_layers
from isoloss.models.mcore.weight_stream import Named, Receives, stream_weights
from isoloss.models.weights.checkpoint_names import local_name
from isoloss.models.weights.hf_checkpoint import WeightSource
from isoloss.models.weights.weight_map import weight_map
from isoloss.parallel import Mesh
from isoloss.parallel.collectives import gather_rows, gather_shards, sum_gradient
from isoloss.parallel.loss_head import LossHeadOptions, LowRank, softcapped, unrounded_logits, vocab_parallel_logprobs
from isoloss.parallel.ops.prepacked import PackedMatrix
from isoloss.parallel.rank0 import is_main
from isoloss.parallel.runtime.console import Progress
from isoloss.parallel.top_tokens import most_probable


def own_data(parameter: Tensor) -> Tensor:
    """Return the values of a parameter."""
    return parameter.data


@dataclass(frozen=True)
class LocalWeight:
    """A parameter (or buffer) of this rank and the weight that it is a TP shard of.

    tp: the group that the shards are spread over; for an expert that of its own tensor parallelism.
    replica: the weight also lives on the first pipeline stage (a tied output matrix on the last one); a visit of every
    weight once skips it.
    first: whether, of the ranks of its stage that hold this very shard, this one is the first.
    """

    weight: Weight
    parameter: Tensor
    tp: dist.ProcessGroup
    replica: bool
    first: bool


@dataclass(frozen=True)
class Model:
    """This rank's part of a model.

    chunks: one module, or `vpp` in an interleaved pipeline; inside of Megatron's DistributedDataParallel once trained.
    arch: architecture of the whole model.
    dtype: type of the weights.
    stages: layers of each pipeline stage, in the order of the model.
    kernels: kernels used on a GPU.

    Shape suffixes: N labeled positions of this rank's slice of a packed row, V vocabulary columns of this TP rank.
    """

    chunks: Sequence[nn.Module]
    arch: Architecture
    mesh: Mesh
    dtype: torch.dtype
    stages: tuple[int, ...]
    kernels: Kernels

    @classmethod
    def build(
        cls,
        arch: Architecture,
        mesh: Mesh,
        dtype: torch.dtype,
        stages: Sequence[int] | None = None,
        options: BuildOptions = PLAIN,
    ) -> "Model":
        """Build this rank's part of a model, with uninitialised weights.

        stages: layers of each; None: stages of even cost.

        Collectives: with tied embeddings and a pipeline, Megatron exchanges the embedding between first and last stage.
        """
        stages = tuple(stages or stage_layers(arch, mesh.layout))
        chunks = build_chunks(arch, mesh, dtype, stages, options)
        return cls(chunks, arch, mesh, dtype, stages, options.kernels)

    @property
    def modules(self) -> list[PackedGPT]:
        """The chunks without what is wrapped around them."""
        return [unwrap(chunk) for chunk in self.chunks]

    @property
    def adapter_record(self) -> None:
        """Return what a checkpoint says of an adapter: this is a whole model."""

    @property
    def device(self) -> torch.device:
        return next(self.chunks[0].parameters()).device

    def tensors(self) -> list[Tensor]:
        """Every parameter and buffer of this rank."""
        return [tensor for module in self.modules for tensor in (*module.parameters(), *module.buffers())]

    # ---- heads: on ranks of the last stage, from its hidden states ---------------------------------------------------

    def logprobs(
        self,
        hidden: Tensor,
        labelled_N: Tensor,
        targets_N: Tensor,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the targets, [N] or [N, K], and the entropy, [N], at the labeled positions.

        labelled_N: indices into this rank's slice.
        targets_N: the tokens to be predicted there, [N] or [N, K].
        temperature: logits are divided by it.
        Collectives over TP: a gather of the slice if it is sequence-parallel, and those of `vocab_parallel_logprobs`.
        """
        module, hidden_ND = self.modules[-1], self._labelled(hidden, labelled_N)
        return vocab_parallel_logprobs(
            hidden_ND,
            module.output_weight(),
            targets_N,
            self.arch.vocab_size,
            self.mesh.tp,
            LossHeadOptions(
                temperature, self.arch.logit_softcap, with_entropy, fused=self.kernels.loss_head and hidden.is_cuda
            ),
            module.output_gradient(),
            self._low_rank(hidden_ND),
        )

    def values(self, hidden: Tensor, labelled_N: Tensor) -> Tensor:
        """A critic's expected returns at the labeled positions, [N].

        Collectives over TP: a gather of the slice if it is sequence-parallel, and one all-reduce.
        """
        return self.modules[-1].output_layer(self._labelled(hidden, labelled_N))

    def logits(self, hidden: Tensor, labelled_N: Tensor, head: PackedMatrix | None = None) -> Tensor:
        """All logits at the labeled positions, [N, vocab_size], on every TP rank: to look at, without gradients.

        head: the output matrix, packed.
        Collectives over TP: a gather of the slice if it is sequence-parallel, and one of the logits.
        """
        hidden_ND = self._labelled(hidden, labelled_N)
        logits_NV = head.product(hidden_ND) if head else unrounded_logits(hidden_ND, self.modules[-1].output_weight())
        low_rank = self._low_rank(hidden_ND)
        if low_rank is not None:
            low_rank.add_to(logits_NV)
        softcapped(logits_NV, self.arch.logit_softcap)
        return gather_rows(logits_NV.T, self.mesh.tp).T[:, : self.arch.vocab_size]

    def _low_rank(self, hidden_ND: Tensor) -> LowRank | None:
        slot = self.modules[-1].adapter
        adapter = slot and slot.active
        if adapter is None:
            return None
        return LowRank(linear(hidden_ND, adapter.a) * adapter.factors.scale, adapter.b)

    def most_probable(self, hidden: Tensor, labelled_N: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """The ids and log-probabilities of the most probable tokens at the labeled positions, [N, num], on every TP
        rank: see `top_tokens.most_probable`.

        Collectives over TP: a gather of the slice if it is sequence-parallel, and that of `most_probable`.
        """
        hidden_ND, weight_VD = self._labelled(hidden, labelled_N), self.modules[-1].output_weight()
        row = hidden_ND, weight_VD, num, self.arch.vocab_size, self.mesh.tp
        return most_probable(*row, self.arch.logit_softcap, self._low_rank(hidden_ND))

    def _labelled(self, hidden: Tensor, labelled_N: Tensor) -> Tensor:
        if self.mesh.layout.sequence_parallel:
            return gather_rows(hidden.squeeze(1), self.mesh.tp)[labelled_N]
        return sum_gradient(hidden.squeeze(1)[labelled_N], self.mesh.tp)

    # ---- weights -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, source: WeightSource) -> None:
        """Fill this rank's parameters, one weight in memory at a time; rank 0 prints progress. No collectives."""
        weights = self.owned()
        nbytes = [math.prod(owned.weight.shape) * owned.parameter.element_size() for owned in weights]
        with Progress("loading", "of weights", lambda: sum(nbytes), is_main(), nbytes=True) as progress:
            for owned, number in zip(weights, nbytes):
                whole = source.whole(owned.weight)
                owned.parameter.copy_(owned.weight.mapping.shard(whole, owned.tp.size(), owned.tp.rank()))
                progress.advance(number)

    def owned(self) -> list[LocalWeight]:
        """Every parameter and buffer of this rank, in the order of the model.

        Raises KeyError for one that the weight map lacks.
        """
        weights = {weight.name: weight for weight in weight_map(self.arch)}
        owned = []
        for module in self.modules:
            for name, parameter in module.state_dict(keep_vars=True).items():
                if name.endswith("_extra_state"):  # scales of fp8, which nothing here has
                    continue
                replica = name == "output_layer.weight" and self.arch.tie_embeddings
                if replica:
                    name = "embedding.word_embeddings.weight"
                elif name.startswith("decoder.layers."):
                    name = self._global_name(name, module)
                weight = weights[name]
                if weight.expert is None:
                    tp, first = self.mesh.tp, self.mesh.dp_context.rank() == 0
                else:
                    tp, first = self.mesh.etp, self.mesh.expert_dp.rank() == 0
                owned.append(LocalWeight(weight, parameter, tp, replica, first))
        return owned

    def _global_name(self, name: str, module: PackedGPT) -> str:
        """The name in the whole model of a parameter of a layer of `module`."""
        decoder, layers, index, *within = name.split(".")
        modules: Any = module.decoder.layers
        layer = modules[int(index)].layer_number - 1
        rest = local_name(".".join(within), self.arch.layers[layer]).split(".")
        if "local_experts" in rest:
            assert self.arch.experts is not None
            place = rest.index("local_experts") + 1
            first_expert = self.mesh.ep.rank() * (self.arch.experts.count // self.mesh.layout.ep)
            rest[place] = str(int(rest[place]) + first_expert)
        return ".".join([decoder, layers, str(layer), *rest])

    def whole_tensors(self, of: Callable[[Tensor], Tensor] = own_data) -> Iterator[tuple[LocalWeight, Tensor]]:
        """Every weight of this rank, whole, one at a time (`of` picks the tensor: the data, the gradient ...).

        That is every weight of its pipeline stage, and with ep > 1 its share of the experts. A copy of a tied embedding
        is left out. Collective over tp and etp, one all-gather a weight: all their ranks must iterate to the end.
        """
        for owned in self.owned():
            if not owned.replica:
                yield owned, owned.weight.mapping.unshard(gather_shards(of(owned.parameter), owned.tp))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole weights of this rank, as `whole_tensors`."""
        for owned, whole in self.whole_tensors():
            yield owned.weight.name, whole

    def hf_tensors(
        self,
        dtype: torch.dtype,
        arch: Architecture | None = None,
        own_dtypes: Mapping[str, torch.dtype] = {},
        of: Callable[[Tensor], Tensor] = own_data,
    ) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield Hugging Face names and tensors of this rank, and True where this rank of all is to write the tensor.

        arch: architecture that names the tensors; default the one of the files that the model came from.
        own_dtypes: types by name of tensors whose type is not `dtype`.
        of: function that picks the tensor of a parameter.

        Tensors are on the model's device and may be the parameters themselves. One weight is in memory at a time, or
        where a tensor holds all experts, one layer's. What is not trained stays fp32. Collective over tp, etp and ep.
        """
        ep = self.mesh.ep
        named = {weight.name: weight for weight in weight_map(arch or self.arch)}
        rows: dict[str, list[Tensor]] = {}
        for owned, whole in self.whole_tensors(of):
            weight = named[owned.weight.name]
            for part, tensor in zip(weight.parts, weight.mapping.split(whole)):
                tensor = tensor.to(own_dtypes.get(part.tensor, dtype if weight.trained else torch.float32))
                mine = owned.first and owned.tp.rank() == 0
                if part.rows is None:
                    yield part.tensor, tensor, mine
                    continue
                kept = rows.setdefault(part.tensor, [])
                kept.append(tensor)
                if len(kept) == part.rows // ep.size():
                    shards = gather_shards(torch.stack(rows.pop(part.tensor)), ep)
                    all_experts = shards[0] if ep.size() == 1 else torch.cat(shards)
                    yield part.tensor, all_experts, mine and ep.rank() == 0

    def weight_stream(
        self,
        bucket_bytes: int,
        receives: Receives,
        dtype: torch.dtype | None = None,
        of: Callable[[Tensor], Tensor] = own_data,
    ) -> Iterator[list[Named]]:
        """Every weight, whole, under its Hugging Face name, in buckets, on the ranks that `receives` names.

        dtype: default the model's own.
        of: function that picks the tensor of a parameter.
        Collective over the world: every rank exhausts the iterator.
        """
        return stream_weights(self.hf_tensors(dtype or self.dtype, of=of), self.device, bucket_bytes, receives)
