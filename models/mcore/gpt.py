"""A packed row on its way through Megatron's GPTModel, from token ids to the last hidden states.

Rotary angles are looked up by position id. The heads of `Model` visit labelled positions only, so the model ends before
them.

Megatron knows of a token's identity no more than a padding mask, an argument of the model. It does not reach the layers
behind those that `recompute_method="block"` computes again, and the MoE layer makes booleans of it. The packed row does
reach every layer, in every forward and in every repetition of it in the backward, so it brings the tokens along.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from isoloss.models.mcore.router_losses import RoutedTokens
from isoloss.parallel.attention import PackedRow


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


@dataclass
class RoutedRow(PackedRow):
    """A packed row whose tokens the routers know. tokens: None where nobody asks them for more than experts."""

    tokens: RoutedTokens | None = None


class ExpertTransformerLayer(TransformerLayer):
    """Hands the tokens of the row to the MLP, in Megatron's slot for a padding mask."""

    def forward(self, *args, packed_seq_params: RoutedRow, **kwargs):
        kwargs["padding_mask"] = packed_seq_params.tokens
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


class ExpertLayer(MoELayer):
    """Megatron's MoE layer, whose router gets the tokens as they are."""

    router: Any

    def forward(self, hidden_states: Tensor, intermediate_tensors=None, padding_mask: RoutedTokens | None = None):
        assert intermediate_tensors is None  # of CUDA graphs
        compute = partial(self._compute, tokens=padding_mask)
        if self.moe_layer_recompute:
            return tensor_parallel.checkpoint(compute, False, hidden_states)
        return compute(hidden_states)

    def _compute(self, hidden_states: Tensor, tokens: RoutedTokens | None) -> tuple[Tensor, None]:
        shared = self.shared_experts_compute(hidden_states)
        dispatched, weights = self.preprocess(hidden_states, *self.router(hidden_states, tokens))
        output, bias = self.routed_experts_compute(*self.dispatch(dispatched, weights))
        return self.postprocess(self.combine(output), shared), bias


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
