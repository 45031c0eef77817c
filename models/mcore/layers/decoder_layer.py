"""A layer: Megatron's, with what the description of a layer says about its norms and its output."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from isoloss.models.kinds.layer import Layer
from isoloss.models.mcore.layers.norm import RMSNorm
from isoloss.models.mcore.layers.residual_norm import ResidualNorm
from isoloss.parallel.attention import PackedRow

# Adds an output, with its bias or None, to the residual stream; the number is a dropout.
Added = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


class DecoderLayer(TransformerLayer):
    """Megatron's layer. Both slots before an MLP are given to its norm if that is a ResidualNorm; a norm that is
    computed again in the backward (`recompute_modules=[layernorm]`) is a step of its own.

    With `sandwich` outputs of attention and MLP are normed as well (Gemma). With `scalar` a number of the layer, not
    trained, multiplies its output: a buffer in fp32, which no optimizer sees and checkpoints hold, rounded to the type
    of the residual stream as transformers rounds it. Experts are handed the row, in Megatron's slot for a padding mask.
    """

    layer_scalar: Tensor

    def __init__(self, *args: Any, description: Layer, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.description = description
        if isinstance(self.pre_mlp_layernorm, ResidualNorm) and not self.recompute_pre_mlp_layernorm:
            self.self_attn_bda = self.pre_mlp_layernorm.add
        if description.sandwich:
            size, eps = self.config.hidden_size, self.config.layernorm_epsilon
            self.post_self_attn_layernorm, self.post_mlp_layernorm = (RMSNorm(self.config, size, eps) for _ in range(2))
            self.self_attn_bda = _normed(self.post_self_attn_layernorm, self.self_attn_bda)
            self.mlp_bda = _normed(self.post_mlp_layernorm, self.mlp_bda)
        if description.scalar:
            self.register_buffer("layer_scalar", torch.ones(1, device=torch.cuda.current_device()))

    def forward(self, *args: Any, packed_seq_params: PackedRow, **kwargs: Any) -> tuple[Tensor, Any]:
        if self.description.mlp.experts:
            kwargs["padding_mask"] = packed_seq_params
        output: Any = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        hidden, context = output
        return hidden * self.layer_scalar.to(hidden.dtype) if self.description.scalar else hidden, context


def _normed(norm: RMSNorm, slot: Callable[[bool, bool], Added]) -> Callable[[bool, bool], Added]:
    """Return a filling of Megatron's slot for bias, dropout and residual that norms the output, then adds by `slot`."""

    def add(training: bool, fused: bool) -> Added:
        one_by_one = slot(training, fused)

        def added(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_and_bias
            return one_by_one((norm(output if bias is None else output + bias), None), residual, dropout)

        return added

    return add
