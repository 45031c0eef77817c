"""Experts and a dense MLP side by side, in the slot of the MLP (Gemma 4's sparse models).

Both halves read the residual stream, each through a norm of its own, and each has a norm behind it; their sum is what
the slot gives. The dense half is Megatron's shared expert. The router norms the residual stream itself.

Shape suffixes: Z tokens that a router sees, D hidden size, E experts.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import linear

from isoloss.models.kinds.dense_and_experts import DenseAndExperts
from isoloss.models.mcore.layer_config import BuildOptions
from isoloss.models.mcore.layers.norm import RMSNorm, unit_norm
from isoloss.models.mcore.moe.experts import ExpertLayer, RoutedRow
from isoloss.models.mcore.moe.router import Router
from isoloss.models.mcore.moe.router_losses import RoutedTokens
from isoloss.parallel import Mesh


class DenseAndExpertLayer(ExpertLayer):
    """Add the dense MLP, Megatron's shared expert, to the experts. Each half is normed before and behind."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        norm = partial(RMSNorm, self.config, self.config.hidden_size, self.config.layernorm_epsilon)
        self.pre_shared_expert_layernorm, self.post_shared_expert_layernorm = norm(), norm()
        self.pre_moe_layernorm, self.post_moe_layernorm = norm(), norm()

    @classmethod
    def fill(cls, layer: Any, kind: DenseAndExperts, mesh: Mesh, options: BuildOptions) -> None:
        super().fill(layer, kind, mesh, options)
        layer.mlp.submodules.router = partial(NormedRouter, experts=kind)
        layer.pre_mlp_layernorm = IdentityOp

    def _compute(self, hidden_states: Tensor, row: RoutedRow) -> tuple[Tensor, None]:
        dense = self.shared_experts_compute(self.pre_shared_expert_layernorm(hidden_states))
        routed = self._routed(self.pre_moe_layernorm(hidden_states), self.router(hidden_states, row.tokens), row)
        return self.post_shared_expert_layernorm(dense) + self.post_moe_layernorm(routed), None


class NormedRouter(Router):
    """Norms each token, without a weight, and multiplies it by `scale` / sqrt(hidden size) before the product with the
    experts; their weights, which add up to 1, are multiplied by `per_expert_scale`. Both see, as `weight` does, only
    this TP rank's tokens under sequence parallelism."""

    def __init__(self, config: TransformerConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.scale = nn.Parameter(self.weight.new_empty(config.hidden_size))
        self.per_expert_scale = nn.Parameter(self.weight.new_empty(self.experts.count))
        for parameter in (self.scale, self.per_expert_scale):
            parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def logits(self, hidden: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        normed_ZD = unit_norm(hidden.flatten(0, -2).to(dtype), self.config.layernorm_epsilon)
        scale_D = self.scale.to(dtype) * self.config.hidden_size**-0.5
        return linear(normed_ZD, self.weight.to(dtype) * scale_D)

    def forward(self, hidden: Tensor, tokens: RoutedTokens | None = None) -> tuple[Tensor, Tensor, Tensor]:
        weights_ZE, chosen_ZE, chosen_ZX = super().forward(hidden, tokens)
        return weights_ZE * self.per_expert_scale.to(weights_ZE.dtype), chosen_ZE, chosen_ZX
