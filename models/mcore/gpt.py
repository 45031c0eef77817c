"""A GPTModel that looks rotary angles up by position id and ends at the last hidden states: the loss head visits
labelled positions only (`isoloss.parallel.vocab`)."""

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from isoloss.models.architecture import Architecture
from isoloss.models.mcore.expert_layer import RoutedRow
from isoloss.models.mcore.router_losses import RoutedTokens
from isoloss.parallel import Mesh
from isoloss.parallel.collectives import gather_rows, sum_gradient
from isoloss.parallel.vocab import unrounded_logits, vocab_parallel_logprobs


class PackedGPT(GPTModel):
    """GPTModel over one packed row a micro-batch, from token ids to the last hidden states."""

    def __init__(self, *args, inv_freq: Tensor, **kwargs):
        super().__init__(*args, position_embedding_type="none", **kwargs)
        # Not a buffer: it must stay fp32 when the module is cast, and it is not part of a checkpoint.
        self.inv_freq = inv_freq.to(torch.cuda.current_device())

    def _preprocess(self, input_ids, position_ids, *args, **kwargs):
        outputs = super()._preprocess(input_ids, position_ids, *args, **kwargs)
        angles_RD = torch.outer(position_ids[0].to(torch.float32), self.inv_freq).repeat(1, 2)
        return (outputs[0], angles_RD[:, None, None], *outputs[2:])

    def _postprocess(self, hidden_states, *args, **kwargs):
        del args, kwargs
        return hidden_states

    def output_weight(self) -> Tensor:
        """This TP rank's rows of the output matrix (the embedding where they are tied)."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert weight is not None, "only the last pipeline stage has an output matrix"
        return weight


def forward_row(
    chunk: nn.Module,
    tokens_R: Tensor,
    positions_R: Tensor,
    lengths: tuple[int, ...],
    routed: RoutedTokens | None = None,
) -> Tensor:
    """Output of a model chunk for this rank's slice of a packed row: [R (/tp if sequence-parallel), 1, hidden].

    routed: the slice as its routers see it.
    """
    return chunk(
        input_ids=tokens_R[None],
        position_ids=positions_R[None],
        attention_mask=None,
        packed_seq_params=RoutedRow(lengths=lengths, tokens=routed),
    )


def labelled_logprobs(
    chunk: nn.Module,
    hidden: Tensor,
    labelled_N: Tensor,
    targets_N: Tensor,
    arch: Architecture,
    mesh: Mesh,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of the targets (and the entropy) at the labelled positions of this rank's slice, [N].

    hidden: the last stage's output; labelled_N: indices into the slice; targets_N: the tokens to be predicted there.
    temperature: logits are divided by it.
    Collectives over TP: a gather of the slice if it is sequence-parallel, and those of `vocab_parallel_logprobs`.
    """
    return vocab_parallel_logprobs(
        _labelled_hidden(hidden, labelled_N, mesh),
        unwrap(chunk).output_weight(),
        targets_N,
        arch.vocab_size,
        mesh.tp,
        temperature=temperature,
        with_entropy=with_entropy,
    )


def labelled_values(chunk: nn.Module, hidden: Tensor, labelled_N: Tensor, mesh: Mesh) -> Tensor:
    """A critic's expected returns at the labelled positions of this rank's slice, [N].

    Collectives over TP: a gather of the slice if it is sequence-parallel, and one all-reduce.
    """
    return unwrap(chunk).output_layer(_labelled_hidden(hidden, labelled_N, mesh))


def labelled_logits(chunk: nn.Module, hidden: Tensor, labelled_N: Tensor, arch: Architecture, mesh: Mesh) -> Tensor:
    """All logits at the labelled positions, [N, vocab_size], on every TP rank: to look at, without gradients.

    Collectives over TP: a gather of the slice if it is sequence-parallel, and one of the logits.
    """
    logits_NV = unrounded_logits(_labelled_hidden(hidden, labelled_N, mesh), unwrap(chunk).output_weight())
    return gather_rows(logits_NV.T, mesh.tp).T[:, : arch.vocab_size]


def _labelled_hidden(hidden: Tensor, labelled_N: Tensor, mesh: Mesh) -> Tensor:
    if mesh.layout.sequence_parallel:
        return gather_rows(hidden.squeeze(1), mesh.tp)[labelled_N]
    return sum_gradient(hidden.squeeze(1)[labelled_N], mesh.tp)


def unwrap(chunk: nn.Module) -> PackedGPT:
    """The model inside Megatron's DistributedDataParallel wrapper, or the model itself."""
    model = chunk if isinstance(chunk, PackedGPT) else chunk.module
    assert isinstance(model, PackedGPT)
    return model
