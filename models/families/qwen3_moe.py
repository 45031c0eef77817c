"""Qwen3-MoE (text): Qwen3 with a mixture of experts in every layer.

Source: transformers, models/qwen3_moe/modeling_qwen3_moe.py.
"""

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import UNUSED_WINDOW, Family, grouped_query, read
from isoloss.models.families.hf_experts import MOE_IRRELEVANT, MOE_PINNED, experts
from isoloss.models.families.hf_fields import ConfigJson, flag

# Dense layers between the sparse ones are not supported; no published model has them.
PINNED = {
    **MOE_PINNED,
    "attention_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
FIELDS = frozenset(
    {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
)
FAMILY = Family("qwen3_moe", pinned=PINNED, irrelevant=UNUSED_WINDOW | MOE_IRRELEVANT, fields=FIELDS)


def architecture(config: ConfigJson) -> Architecture:
    chosen, normalize = ("num_experts", "num_local_experts"), flag(config, "norm_topk_prob")
    moe = experts(config, count=chosen, score="softmax", normalize=normalize)
    return read(config, FAMILY, grouped_query(config, FAMILY, qk_norm="head"), moe)
