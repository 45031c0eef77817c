"""A mixture of experts: MLPs of which each token is computed by a few, which a router chooses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from isoloss.models.kinds.dense import PROJECTIONS, gated_mlp
from isoloss.models.kinds.kind import MLP, RECORDED_ACTIVATION, Activation, Place, Recorded, Refusal, divisors
from isoloss.models.kinds.mappings import (
    InterleavedGatedMLP,
    JoinedGatedMLP,
    ParamMapping,
    Replicated,
    RowParallel,
    TransposedRowParallel,
)
from isoloss.models.kinds.weight import Part, Shape, Weight
from isoloss.parallel import Layout


@dataclass(frozen=True)
class ExpertNames:
    """The names in Hugging Face files of a layer's experts, below `model.layers.N.`.

    module: holds router and experts.
    projections: gate, up and down of an expert.
    stacked: gate_up_proj and down_proj hold those of all experts: as `rows` (gate above up, Qwen3.5), or `transposed`,
        gate and up interleaved, with biases (gpt-oss).
    selection_bias, shared, shared_gate: the selection bias, the shared experts and their gate, below the module.
    """

    module: str = "mlp"
    router: str = "gate"
    projections: tuple[str, str, str] = PROJECTIONS
    stacked: Literal["", "rows", "transposed"] = ""
    selection_bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True)
class Experts(MLP):
    """count, top_k: how many there are, and how many compute a token.
    intermediate_size: width of one.
    score: router logits become scores by `softmax` over all experts or by `sigmoid`.
    normalize: the weights of the chosen experts are divided by their sum.
    scaling: then multiplied by this.
    selection_bias: a bias for each expert that is added to the scores for the selection only (arXiv:2408.15664).
    groups, groups_kept: experts are chosen among the best groups, by the sum of each group's two highest scores.
    shared_size: width of the MLP that sees every token; 0: there is none.
    shared_gate: its output is multiplied by a sigmoid of a product of the token with a vector.
    bias: router and experts have biases.
    """

    count: int
    top_k: int
    intermediate_size: int
    score: Literal["softmax", "sigmoid"]
    normalize: bool
    scaling: float = 1.0
    selection_bias: bool = False
    groups: int = 1
    groups_kept: int = 1
    shared_size: int = 0
    shared_gate: bool = False
    bias: bool = False
    activation: Activation = "swiglu"
    names: ExpertNames = ExpertNames()

    @property
    def experts(self) -> "Experts":
        return self

    @property
    def recomputes(self) -> Sequence[str]:
        return ("moe", "experts", "shared_experts") if self.shared_size else ("moe", "experts")

    def weights(self, place: Place) -> Iterator[Weight]:
        mcore, hf, names = "mlp.", f"{self.names.module}.", self.names
        router = f"{hf}{names.router}"
        yield place.weight(f"{mcore}router.weight", f"{router}.weight", (self.count, place.hidden))
        if self.bias:
            yield place.weight(f"{mcore}router.bias", f"{router}.bias", (self.count,))
        if self.selection_bias:
            bias = place.weight(f"{mcore}router.expert_bias", f"{hf}{names.selection_bias}", (self.count,))
            yield replace(bias, trained=False)
        if self.shared_size:
            yield from gated_mlp(place, f"{mcore}shared_experts.", f"{hf}{names.shared}.", self.shared_size)
        if self.shared_gate:
            gate = f"{hf}{names.shared_gate}.weight"
            yield place.weight(f"{mcore}shared_experts.gate_weight", gate, (1, place.hidden))
        for expert in range(self.count):
            name = f"{mcore}experts.local_experts.{expert}."
            if names.stacked:
                yield from self._stacked(place, name, f"{hf}experts.", expert)
            else:
                prefix = f"{hf}experts.{expert}."
                yield from gated_mlp(place, name, prefix, self.intermediate_size, names.projections, expert)

    def _stacked(self, place: Place, mcore: str, hf: str, expert: int) -> Iterator[Weight]:
        """An expert whose tensors hold all experts."""
        hidden, wide = place.hidden, self.intermediate_size

        def row(name: str, tensor: str, shape: Shape, mapping: ParamMapping, stored: Shape | None = None) -> Weight:
            part = Part(place.tensor(hf + tensor), stored or shape, expert, self.count)
            return replace(place.joined(mcore + name, shape, {}, mapping, expert), parts=(part,))

        if self.names.stacked == "rows":
            yield row("linear_fc1.weight", "gate_up_proj", (2 * wide, hidden), JoinedGatedMLP())
            yield row("linear_fc2.weight", "down_proj", (hidden, wide), RowParallel())
            return
        gate_up = InterleavedGatedMLP()
        yield row("linear_fc1.weight", "gate_up_proj", (2 * wide, hidden), gate_up, (hidden, 2 * wide))
        yield row("linear_fc1.bias", "gate_up_proj_bias", (2 * wide,), gate_up)
        yield row("linear_fc2.weight", "down_proj", (hidden, wide), TransposedRowParallel(), (wide, hidden))
        yield row("linear_fc2.bias", "down_proj_bias", (hidden,), Replicated())

    def linears(self) -> Sequence[str]:
        modules = ("experts.local_experts", "shared_experts") if self.shared_size else ("experts.local_experts",)
        return tuple(f"mlp.{module}.{linear}" for module in modules for linear in ("linear_fc1", "linear_fc2"))

    def refusals(self, layout: Layout) -> Iterator[Refusal]:
        if layout.tp > 1 and not layout.sequence_parallel:
            why = "does not work with experts and parallel.tp > 1: "
            why += "every TP rank would send the same tokens to the experts"
            yield "parallel.sequence_parallel", why, "leave it at null"
        if self.count % layout.ep:
            yield "parallel.ep", f"does not divide the model's {self.count} experts", divisors(self.count)
        if self.intermediate_size % layout.etp:
            why = f"does not divide the model's expert width {self.intermediate_size}"
            yield "parallel.etp", why, divisors(self.intermediate_size)
        if self.shared_size % layout.tp:
            why = f"does not divide the model's shared expert's width {self.shared_size}"
            yield "parallel.tp", why, divisors(self.shared_size)
        if layout.etp > 1 and self.bias:
            yield "parallel.etp", "does not work with biases in the experts", "set it to 1"

    def recorded(self) -> Iterator[Recorded]:
        yield "activation_func", "hidden_act", RECORDED_ACTIVATION[self.activation]
        yield "moe_router_topk", "num_experts_per_tok", self.top_k
        yield "moe_ffn_hidden_size", "moe_intermediate_size", self.intermediate_size
        yield "moe_shared_expert_intermediate_size", "n_shared_experts*moe_intermediate_size", self.shared_size
        yield "moe_shared_expert_gate", "shared_expert_gate", self.shared_gate
        yield "moe_router_score_function", "scoring_func", self.score
        yield "moe_router_enable_expert_bias", "e_score_correction_bias", self.selection_bias
        yield "moe_router_topk_scaling_factor", "routed_scaling_factor", self.scaling
        yield "moe_router_num_groups", "n_group", self.groups
        yield "moe_router_group_topk", "topk_group", self.groups_kept
        if self.score == "softmax" and self.top_k > 1:
            yield "moe_router_pre_softmax", "not norm_topk_prob", not self.normalize

    def settings(self) -> dict[str, Any]:
        return {
            "num_moe_experts": self.count,
            "moe_ffn_hidden_size": self.intermediate_size,
            "moe_shared_expert_intermediate_size": self.shared_size or None,
            "moe_shared_expert_gate": self.shared_gate,
            # Read by Megatron's checks only: `Router` chooses the experts.
            "moe_router_topk": self.top_k,
            "moe_router_pre_softmax": True,
            "moe_router_load_balancing_type": "none",
        }
