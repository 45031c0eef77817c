"""Layers whose attention and MLP are normed behind as well as before (Gemma)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isoloss.models.mcore.layers.norm import RMSNorm
from isoloss.models.mcore.layers.residual_norm import ResidualNormLayer

# Adds an output, with its bias or None, to the residual stream; the number is a dropout.
Added = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


class SandwichLayer(ResidualNormLayer):
    """scaled: a number of the layer, not trained, multiplies what it gives. It is a buffer in fp32, which no optimizer
    sees and checkpoints hold, and is rounded to the type of the residual stream as transformers rounds it."""

    layer_scalar: Tensor

    def __init__(self, *args: Any, scaled: bool, **kwargs: Any):
        super().__init__(*args, **kwargs)
        size, eps = self.config.hidden_size, self.config.layernorm_epsilon
        self.post_self_attn_layernorm, self.post_mlp_layernorm = (RMSNorm(self.config, size, eps) for _ in range(2))
        self.self_attn_bda = _normed(self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda = _normed(self.post_mlp_layernorm, self.mlp_bda)
        if scaled:
            self.register_buffer("layer_scalar", torch.ones(1, device=torch.cuda.current_device()))
        self._scaled = scaled

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        given: Any = super().forward(*args, **kwargs)
        hidden, context = given
        return hidden * self.layer_scalar.to(hidden.dtype) if self._scaled else hidden, context


def _normed(norm: RMSNorm, slot: Callable[[bool, bool], Added]) -> Callable[[bool, bool], Added]:
    """What norms, and adds as `slot` does, in Megatron's slot for a bias, dropout and the residual stream."""

    def add(training: bool, fused: bool) -> Added:
        one_by_one = slot(training, fused)

        def added(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_and_bias
            return one_by_one((norm(output if bias is None else output + bias), None), residual, dropout)

        return added

    return add
