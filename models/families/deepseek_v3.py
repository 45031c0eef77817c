"""DeepSeek-V3 and R1 (arXiv:2412.19437): latent attention, YaRN, and experts chosen by sigmoid scores within groups.
Kimi-K2 (arXiv:2507.20534) and Moonlight are the same with other sizes.

Source: transformers, models/deepseek_v3/modeling_deepseek_v3.py. The layers for multi-token prediction that the hub
files append are not part of what the model computes.
"""

from isoloss.models.architecture import MTP_LAYERS, Architecture
from isoloss.models.families.hf_config import FULL, Family, check_fields, read
from isoloss.models.families.hf_experts import (
    GROUPED_EXPERTS,
    MOE_IRRELEVANT,
    MOE_PINNED,
    first_dense_layers,
    grouped_experts,
)
from isoloss.models.families.hf_fields import ConfigJson, positive_int, refuse, with_absent
from isoloss.models.families.hf_rope import rotary_dim
from isoloss.models.kinds.experts import Experts
from isoloss.models.kinds.latent import Latent

PINNED = {
    **MOE_PINNED,
    "attention_bias": False,
    "pretraining_tp": 1,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
# Widths that transformers derives from the others and writes down as well; and where the hub files point at code
# that transformers has long taken over.
IRRELEVANT = MOE_IRRELEVANT | {"head_dim", "qk_head_dim", "auto_map"}
FIELDS = GROUPED_EXPERTS | {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}


ABSENT = {"first_k_dense_replace": 3, "num_key_value_heads": 128, "num_nextn_predict_layers": 1}
FAMILY = Family("deepseek_v3", pinned=PINNED, irrelevant=IRRELEVANT, fields=FIELDS)
KIMI_K2 = "kimi_k2"  # what the hub files of Kimi-K2 give as their model_type, though their code is DeepSeek-V3's


def architecture(config: ConfigJson) -> Architecture:
    if config.get("model_type") == KIMI_K2:
        config = {**config, "model_type": "deepseek_v3"}
    config = with_absent(config, ABSENT, spellings=MTP_LAYERS)
    return latent_architecture(config, FAMILY, grouped_experts(config), first_dense_layers(config))


def latent_architecture(config: ConfigJson, family: Family, experts: Experts, dense_layers: int) -> Architecture:
    """Return the architecture of a family with DeepSeek-V3's attention. dense_layers: those before the experts."""
    check_fields(config, family)
    heads, rope_dim = positive_int(config, "num_attention_heads"), positive_int(config, "qk_rope_head_dim")
    if rope_dim % 2:
        refuse("qk_rope_head_dim", rope_dim, "must be even: rotary positions turn pairs of channels")
    latent = Latent(
        heads=heads,
        q_rank=None if config.get("q_lora_rank", 0) is None else positive_int(config, "q_lora_rank"),
        kv_rank=positive_int(config, "kv_lora_rank"),
        nope_dim=positive_int(config, "qk_nope_head_dim"),
        rope_dim=rotary_dim(config, rope_dim, None),
        value_dim=positive_int(config, "v_head_dim"),
        rope=family.rope(config, interleaved=True),
    )
    if config.get("num_key_value_heads") not in (None, heads):
        refuse("num_key_value_heads", config["num_key_value_heads"], f"must be num_attention_heads={heads}")
    return read(config, family, {FULL: latent}, experts, dense_layers=dense_layers)
