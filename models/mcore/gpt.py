"""A packed row on its way through Megatron's GPTModel, from token ids to the last hidden states.

Rotary angles are looked up by position id, once for all layers. The heads of `Model` visit labeled positions only, so
the model ends before them.
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from isoloss.models.mcore.layer_config import LayerConfig
from isoloss.models.mcore.layers.rotary import rotary_table
from isoloss.models.mcore.moe.experts import RoutedRow
from isoloss.models.mcore.moe.grouped_experts import wait_for_weights
from isoloss.parallel.ops.matmul import main_grad_to_add_to


class PackedGPT(GPTModel):
    """GPTModel over one packed row a micro-batch, from token ids to the last hidden states."""

    config: LayerConfig
    # Adapters of the output matrix, of which the heads of `Model` multiply by the active one as well (`lora.Slot`).
    adapter: Any = None

    def __init__(
        self,
        *args,
        rotary_factor: float = 1.0,
        embedding_factor: float = 1.0,
        **kwargs,
    ):
        super().__init__(*args, position_embedding_type="none", **kwargs)
        self.rotary_factor, self.embedding_factor = rotary_factor, embedding_factor
        # Not a buffer: it must stay fp32 when the module is cast, and it is not part of a checkpoint.
        inv_freqs = [rope.inv_freq(channels) for rope, channels in self.config.ropes]
        self.inv_freq = torch.cat([torch.empty(0, dtype=torch.float32), *inv_freqs]).to(torch.cuda.current_device())
        self.query_scaling = self.config.ropes[0][0].query_scaling if self.config.ropes else None

    def _preprocess(self, input_ids, position_ids, *args, **kwargs):
        outputs = super()._preprocess(input_ids, position_ids, *args, **kwargs)
        hidden = outputs[0]
        if hidden is not None and self.embedding_factor != 1:
            hidden = hidden * self.embedding_factor
        if hidden is not None and torch.is_grad_enabled() and not hidden.requires_grad:
            # Of a frozen embedding: layers that are computed again in the backward pass no gradient to adapters inside
            # of them without one of their input.
            hidden.requires_grad_()
        exact = self.config.kernels.rope and position_ids.is_cuda
        dtype = torch.float32 if exact else self.config.params_dtype
        return (hidden, rotary_table(position_ids[0], self.inv_freq, self.rotary_factor, dtype), *outputs[2:])

    def _postprocess(self, hidden_states, *args, **kwargs):
        del args, kwargs
        return hidden_states

    def output_weight(self) -> Tensor:
        """This TP rank's rows of the output matrix (the embedding where they are tied)."""
        assert self.post_process, "only the last pipeline stage has an output matrix"
        tied = self.share_embeddings_and_output_weights and self.pre_process
        module = self.embedding.word_embeddings if tied else self.output_layer
        wait_for_weights(module)
        weight = module.weight
        assert weight is not None, "the module has its own"
        return weight

    def output_gradient(self) -> Tensor | None:
        """Megatron's buffer for the gradient of the output matrix, where the loss head adds to it itself
        (`build.accumulate_in_products`). Where the matrix is the embedding of the same stage only if that adds to it
        too (`build.accumulate_in_embedding`): else autograd adds the gradients of the two.
        """
        tied = self.share_embeddings_and_output_weights and self.pre_process
        return main_grad_to_add_to(self.embedding.word_embeddings if tied else self.output_layer)


def forward_row(chunk: nn.Module, tokens_R: Tensor, positions_R: Tensor, row: RoutedRow) -> Tensor:
    """Return the output of a model chunk for this rank's slice of a packed row: [R (/tp if sequence-parallel), 1,
    hidden]. row: of this forward alone; the factors of its queries are filled in here."""
    scaling = unwrap(chunk).query_scaling
    row.query_factors_R = None if scaling is None else scaling.factors(positions_R)
    return chunk(input_ids=tokens_R[None], position_ids=positions_R[None], attention_mask=None, packed_seq_params=row)


def unwrap(chunk: nn.Module) -> PackedGPT:
    """The model inside Megatron's DistributedDataParallel wrapper, or the model itself."""
    model = chunk if isinstance(chunk, PackedGPT) else chunk.module
    assert isinstance(model, PackedGPT)
    return model
