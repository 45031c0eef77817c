"""A dense MLP and experts side by side, each between norms of its own (Gemma 4's sparse models)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from isoloss.models.kinds.dense import gated_mlp
from isoloss.models.kinds.experts import ExpertNames, Experts
from isoloss.models.kinds.kind import Place, Recorded
from isoloss.models.kinds.weight import Weight

# Megatron-Core's module of each norm, and what Hugging Face files call it.
NORMS = {
    "pre_shared_expert_layernorm": "pre_feedforward_layernorm",
    "post_shared_expert_layernorm": "post_feedforward_layernorm_1",
    "pre_moe_layernorm": "pre_feedforward_layernorm_2",
    "post_moe_layernorm": "post_feedforward_layernorm_2",
}
STACKED = ExpertNames(stacked="rows")
CONFIG_NAMES = {"moe_shared_expert_intermediate_size": "intermediate_size", "moe_router_topk": "top_k_experts"}


@dataclass(frozen=True)
class DenseAndExperts(Experts):
    """`Experts`, to whose output that of a dense MLP of width `shared_size` is added.

    The router norms each token without a weight and multiplies it by `scale` / sqrt(hidden size); the weights of the
    chosen experts, which add up to 1, are multiplied by `per_expert_scale`. Files hold all experts in one tensor.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    names: ExpertNames = STACKED

    def norm(self, place: Place, name: str) -> Iterator[Weight]:
        for module, tensor in NORMS.items():
            yield place.weight(f"mlp.{module}.weight", f"{tensor}.weight", (place.hidden,))

    def weights(self, place: Place) -> Iterator[Weight]:
        yield place.weight("mlp.router.weight", "router.proj.weight", (self.count, place.hidden))
        yield place.weight("mlp.router.scale", "router.scale", (place.hidden,))
        yield place.weight("mlp.router.per_expert_scale", "router.per_expert_scale", (self.count,))
        yield from gated_mlp(place, "mlp.shared_experts.", "mlp.", self.shared_size)
        for expert in range(self.count):
            yield from self._stacked(place, f"mlp.experts.local_experts.{expert}.", "experts.", expert)

    def recorded(self) -> Iterator[Recorded]:
        for field, name, value in super().recorded():
            yield field, CONFIG_NAMES.get(field, name), value
