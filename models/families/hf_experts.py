"""The mixture of experts that a config.json describes."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Literal

from isoloss.models.architecture import MTP_LAYERS
from isoloss.models.families.hf_fields import ConfigJson, flag, number_of, positive_int, positive_number, refuse
from isoloss.models.kinds.experts import Experts

# The fields of a model with `grouped_experts`.
GROUPED_EXPERTS = frozenset({
    "n_routed_experts", "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace",
    *MTP_LAYERS,
})  # fmt: skip
# The fields of one with a shared expert that has a size of its own.
SHARED_EXPERT = frozenset({
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size",
})  # fmt: skip
MOE_IRRELEVANT = frozenset({
    "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size",
})  # fmt: skip
# Transformers would return the router's logits, or add its balancing loss to the loss.
MOE_PINNED = MappingProxyType({"output_router_logits": False, "router_jitter_noise": 0})


def experts(
    config: ConfigJson,
    *,
    count: Sequence[str],
    intermediate_size: str = "moe_intermediate_size",
    score: Literal["softmax", "sigmoid"],
    normalize: bool,
    **known: Any,
) -> Experts:
    """The mixture of experts of `config`. count: the spellings of the field that holds the number of experts."""
    present = [name for name in count if config.get(name) is not None]
    number = positive_int(config, (present or count)[0])
    for name in present[1:]:
        if config[name] != number:
            refuse(name, config[name], f"contradicts {present[0]}={number}; keep one of them")
    experts = Experts(
        count=number,
        top_k=positive_int(config, "num_experts_per_tok"),
        intermediate_size=positive_int(config, intermediate_size),
        score=score,
        normalize=normalize,
        **known,
    )
    if number % experts.groups:
        refuse("n_group", experts.groups, f"must divide the number of experts, {number}")
    if experts.groups_kept > experts.groups:
        refuse("topk_group", experts.groups_kept, f"must not exceed n_group={experts.groups}")
    if experts.groups > 1 and number // experts.groups < 2:
        refuse("n_group", experts.groups, f"leaves groups of fewer than two of the {number} experts")
    if experts.top_k > number // experts.groups * experts.groups_kept:
        refuse("num_experts_per_tok", experts.top_k, f"exceeds the experts that can be chosen, of {number}")
    return experts


def grouped_experts(config: ConfigJson, *, shared: bool = True) -> Experts:
    """Return the experts of DeepSeek-V3 and its followers: sigmoid scores with a selection bias, groups, shared
    experts, unless the family has none (`shared`)."""
    shared_experts = positive_int(config, "n_shared_experts") if shared else 0
    return experts(
        config,
        count=("n_routed_experts", "num_local_experts", "num_experts"),
        score="sigmoid",
        normalize=flag(config, "norm_topk_prob", True),
        scaling=positive_number(config, "routed_scaling_factor"),
        selection_bias=True,
        groups=positive_int(config, "n_group"),
        groups_kept=positive_int(config, "topk_group"),
        shared_size=shared_experts * positive_int(config, "moe_intermediate_size"),
    )


def first_dense_layers(config: ConfigJson) -> int:
    """Return how many layers before those with experts have a dense MLP."""
    if config.get("first_k_dense_replace", 0) is None:
        refuse("first_k_dense_replace", None, "must be a whole number, at least 0")
    return number_of(config, "first_k_dense_replace")


def leading_dense_layers(config: ConfigJson) -> int:
    """Return the same for families that name the kind of each layer's MLP in `mlp_layer_types`; where that is absent,
    the first is dense. The hub files have `first_k_dense_replace`, which transformers then does not read."""
    layers, kinds = positive_int(config, "num_hidden_layers"), config.get("mlp_layer_types")
    if kinds is None:
        kinds = ["dense"] + ["sparse"] * (layers - 1)
    dense = kinds.index("sparse") if isinstance(kinds, list) and "sparse" in kinds else layers
    if dense == layers or kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        why = (
            f"must be a list of num_hidden_layers={layers} entries, dense ones before sparse ones, some of them sparse"
        )
        refuse("mlp_layer_types", kinds, why)
    if config.get("first_k_dense_replace") not in (None, dense):
        refuse("first_k_dense_replace", config["first_k_dense_replace"], f"contradicts {dense} dense layers")
    return dense
