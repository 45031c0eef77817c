"""GLM-4.5 and GLM-4.5-Air (arXiv:2508.06471): grouped-query attention on half of each head's channels rotated, and
DeepSeek-V3's experts.

Source: transformers, models/glm4_moe/modeling_glm4_moe.py. The layers for multi-token prediction that the hub files
append are not part of what the model computes.
"""

from isoloss.models.architecture import MTP_LAYERS, Architecture
from isoloss.models.families.hf_config import Family, grouped_query, read
from isoloss.models.families.hf_experts import (
    GROUPED_EXPERTS,
    MOE_IRRELEVANT,
    MOE_PINNED,
    first_dense_layers,
    grouped_experts,
)
from isoloss.models.families.hf_fields import ConfigJson, flag, with_absent

FIELDS = GROUPED_EXPERTS | {"attention_bias", "use_qk_norm"}
ABSENT = {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
FAMILY = Family("glm4_moe", pinned=MOE_PINNED, irrelevant=MOE_IRRELEVANT, fields=FIELDS, rotary_fraction=0.5)


def architecture(config: ConfigJson) -> Architecture:
    config = with_absent(config, ABSENT, spellings=MTP_LAYERS)
    qk_norm = "head" if flag(config, "use_qk_norm") else ""
    attentions = grouped_query(config, FAMILY, qkv_bias=flag(config, "attention_bias"), qk_norm=qk_norm)
    return read(config, FAMILY, attentions, grouped_experts(config), dense_layers=first_dense_layers(config))
