"""The model of a run, as one noun: what training, generation and files ask of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isoloss.models.architecture import Architecture
from isoloss.models.mcore.activation_memory import KEEP_ALL, ActivationMemory
from isoloss.models.mcore.build import build_chunks
from isoloss.models.mcore.gpt import PackedGPT, unwrap
from isoloss.models.mcore.parameters import Owned, gather, hf_tensors, owned_parameters
from isoloss.models.mcore.stages import stage_layers
from isoloss.models.mcore.weight_stream import Named, Receives, stream_weights
from isoloss.models.weights.hf_checkpoint import WeightSource
from isoloss.parallel import Mesh
from isoloss.parallel.collectives import gather_rows, sum_gradient
from isoloss.parallel.vocab import unrounded_logits, vocab_parallel_logprobs


@dataclass(frozen=True)
class Model:
    """This rank's part of a model.

    chunks: one, or `vpp` of them in an interleaved pipeline; inside of Megatron's DistributedDataParallel once trained.
    arch: of the whole model.
    dtype: of the weights.
    stages: layers of each pipeline stage, in the order of the model.

    Shape suffix: N labelled positions of this rank's slice of a packed row.
    """

    chunks: Sequence[nn.Module]
    arch: Architecture
    mesh: Mesh
    dtype: torch.dtype
    stages: tuple[int, ...]

    @classmethod
    def build(
        cls,
        arch: Architecture,
        mesh: Mesh,
        dtype: torch.dtype,
        stages: Sequence[int] | None = None,
        memory: ActivationMemory = KEEP_ALL,
        *,
        te: bool = False,
    ) -> "Model":
        """With uninitialised weights. stages: None: balanced. te: of Transformer Engine's modules.

        Collectives: with tied embeddings and a pipeline, Megatron exchanges the embedding between first and last stage.
        """
        stages = tuple(stages or stage_layers(arch, mesh.layout))
        return cls(build_chunks(arch, mesh, dtype, stages, memory, te=te), arch, mesh, dtype, stages)

    @property
    def modules(self) -> list[PackedGPT]:
        """The chunks without what is wrapped around them."""
        return [unwrap(chunk) for chunk in self.chunks]

    @property
    def device(self) -> torch.device:
        return next(self.chunks[0].parameters()).device

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
        """Log-probabilities of the targets (and the entropy) at the labelled positions, [N].

        labelled_N: indices into this rank's slice; targets_N: the tokens to be predicted there.
        temperature: logits are divided by it.
        Collectives over TP: a gather of the slice if it is sequence-parallel, and those of `vocab_parallel_logprobs`.
        """
        return vocab_parallel_logprobs(
            self._labelled(hidden, labelled_N),
            self.modules[-1].output_weight(),
            targets_N,
            self.arch.vocab_size,
            self.mesh.tp,
            temperature=temperature,
            with_entropy=with_entropy,
        )

    def values(self, hidden: Tensor, labelled_N: Tensor) -> Tensor:
        """A critic's expected returns at the labelled positions, [N].

        Collectives over TP: a gather of the slice if it is sequence-parallel, and one all-reduce.
        """
        return self.modules[-1].output_layer(self._labelled(hidden, labelled_N))

    def logits(self, hidden: Tensor, labelled_N: Tensor) -> Tensor:
        """All logits at the labelled positions, [N, vocab_size], on every TP rank: to look at, without gradients.

        Collectives over TP: a gather of the slice if it is sequence-parallel, and one of the logits.
        """
        logits_NV = unrounded_logits(self._labelled(hidden, labelled_N), self.modules[-1].output_weight())
        return gather_rows(logits_NV.T, self.mesh.tp).T[:, : self.arch.vocab_size]

    def _labelled(self, hidden: Tensor, labelled_N: Tensor) -> Tensor:
        if self.mesh.layout.sequence_parallel:
            return gather_rows(hidden.squeeze(1), self.mesh.tp)[labelled_N]
        return sum_gradient(hidden.squeeze(1)[labelled_N], self.mesh.tp)

    # ---- weights -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, source: WeightSource) -> None:
        """Fill this rank's parameters, one weight in memory at a time. No collectives."""
        for owned in self.owned():
            whole = source.whole(owned.weight)
            owned.parameter.copy_(owned.weight.form.shard(whole, owned.tp.size(), owned.tp.rank()))

    def owned(self) -> list[Owned]:
        """Every parameter and buffer of this rank, in the order of the model."""
        return owned_parameters(self.modules, self.arch, self.mesh)

    def whole_tensors(self, of: Callable[[Tensor], Tensor] = lambda p: p.data) -> Iterator[tuple[Owned, Tensor]]:
        """Every weight of this rank, whole, one at a time (`of` picks the tensor: the data, the gradient ...).

        That is every weight of its pipeline stage, and with ep > 1 its share of the experts. A copy of a tied embedding
        is left out. Collective over tp and etp: all their ranks must iterate to the end.
        """
        for owned in self.owned():
            if not owned.replica:
                yield owned, gather(of(owned.parameter), owned)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole weights of this rank, as `whole_tensors`."""
        for owned, whole in self.whole_tensors():
            yield owned.weight.name, whole

    def hf_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, bool]]:
        """Hugging Face names and tensors of this rank, and whether it is the one of all ranks to write this one.

        Tensors are on the model's device and may be the parameters themselves. Collective over tp, etp and ep.
        """
        return hf_tensors(self.whole_tensors(), self.mesh.ep, dtype)

    def weight_stream(
        self, bucket_bytes: int, receives: Receives, dtype: torch.dtype | None = None
    ) -> Iterator[list[Named]]:
        """Every weight, whole, under its Hugging Face name, in buckets, on the ranks that `receives` names.

        dtype: default the model's own. Collective over the world: every rank exhausts the iterator.
        """
        return stream_weights(self.hf_tensors(dtype or self.dtype), self.device, bucket_bytes, receives)
