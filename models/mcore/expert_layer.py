"""Megatron's transformer layer and MoE layer, told which tokens the hidden states belong to.

Megatron knows of a token's identity no more than a padding mask, an argument of the model. It does not reach the layers
behind those that `recompute_method="block"` computes again, and the MoE layer makes booleans of it. The packed row does
reach every layer, in every forward and in every repetition of it in the backward, so it brings the tokens along.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from isoloss.models.mcore.router_losses import RoutedTokens
from isoloss.parallel.attention import PackedRow


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
