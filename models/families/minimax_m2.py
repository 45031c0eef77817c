"""MiniMax-M2: grouped-query attention with a norm over all heads of the queries, and of the keys, together, a part of
each head rotated, and experts in every layer, chosen by sigmoid scores with a selection bias.

Source: transformers, models/minimax_m2/modeling_minimax_m2.py; the fields of the hub files that it does not read are
those of the code next to them. Their layers for multi-token prediction are not part of what the model computes.
"""

from dataclasses import replace

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import Family, grouped_query, read
from isoloss.models.families.hf_experts import MOE_IRRELEVANT, MOE_PINNED, experts
from isoloss.models.families.hf_fields import ConfigJson, positive_int, refuse
from isoloss.models.kinds.experts import ExpertNames

PINNED = {
    **MOE_PINNED,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
    "sliding_window": None,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
}
# Of dense layers, of shared experts and of multi-token prediction, which the model has not or which is left out.
IRRELEVANT = MOE_IRRELEVANT | {
    "mlp_intermediate_size", "shared_moe_mode", "use_mtp", "mtp_transformer_layers", "auto_map",
}  # fmt: skip
FIELDS = frozenset({
    "num_local_experts", "num_experts", "num_experts_per_tok", "rotary_dim", "attn_type_list", "num_mtp_modules",
})  # fmt: skip
FAMILY = Family(
    "minimax_m2",
    pinned=PINNED,
    irrelevant=IRRELEVANT,
    fields=FIELDS,
    head_dim_default=128,
    rotary_fraction=1.0,
    theta_default=5e6,
)
NAMES = ExpertNames("block_sparse_moe", projections=("w1", "w3", "w2"), selection_bias="e_score_correction_bias")


def architecture(config: ConfigJson) -> Architecture:
    layers = positive_int(config, "num_hidden_layers")
    if config.get("rotary_dim") is not None:  # an older spelling
        fraction = positive_int(config, "rotary_dim") / positive_int(config, "head_dim")
        if config.get("partial_rotary_factor") not in (None, fraction):
            refuse("rotary_dim", config["rotary_dim"], "contradicts partial_rotary_factor; keep one of them")
        config = {**config, "partial_rotary_factor": fraction}
    # 0 would be a layer of linear attention.
    family = replace(FAMILY, pinned={**PINNED, "attn_type_list": [1] * layers})
    moe = experts(
        config,
        count=("num_local_experts", "num_experts"),
        intermediate_size="intermediate_size",
        score="sigmoid",
        normalize=True,
        selection_bias=True,
        names=NAMES,
    )
    return read(config, family, grouped_query(config, family, qk_norm="joint"), moe)
