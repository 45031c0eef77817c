"""GLM-4.7-Flash: DeepSeek-V3 by another name, in another size.

Source: transformers, models/glm4_moe_lite/modeling_glm4_moe_lite.py. The layer for multi-token prediction that the hub
files append is not part of what the model computes.
"""

from isoloss.models.architecture import Architecture
from isoloss.models.families.deepseek_v3 import FIELDS, latent_architecture
from isoloss.models.families.hf_experts import grouped_experts, leading_dense_layers
from isoloss.models.families.hf_fields import ConfigJson, with_absent

ABSENT = {"num_key_value_heads": 20}


def architecture(config: ConfigJson) -> Architecture:
    config = with_absent(config, ABSENT)
    experts = grouped_experts(config, dense_layers=leading_dense_layers(config))
    return latent_architecture(config, "glm4_moe_lite", experts, fields=FIELDS | {"mlp_layer_types"})
