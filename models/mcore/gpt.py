"""A GPTModel that looks rotary angles up by position id and ends at the last hidden states: the heads of `Model` visit
labelled positions only."""

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from isoloss.models.mcore.expert_layer import RoutedRow
from isoloss.models.mcore.router_losses import RoutedTokens


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


def unwrap(chunk: nn.Module) -> PackedGPT:
    """The model inside Megatron's DistributedDataParallel wrapper, or the model itself."""
    model = chunk if isinstance(chunk, PackedGPT) else chunk.module
    assert isinstance(model, PackedGPT)
    return model
