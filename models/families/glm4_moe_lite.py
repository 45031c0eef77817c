"""GLM-4.7-Flash: DeepSeek-V3 by another name, in another size.

Source: transformers, models/glm4_moe_lite/modeling_glm4_moe_lite.py. The layer for multi-token prediction that the hub
files append is not part of what the model computes.
"""

from dataclasses import replace

from isoloss.models.architecture import Architecture
from isoloss.models.families import deepseek_v3
from isoloss.models.families.deepseek_v3 import latent_architecture
from isoloss.models.families.hf_experts import grouped_experts, leading_dense_layers
from isoloss.models.families.hf_fields import ConfigJson, with_absent

FAMILY = replace(deepseek_v3.FAMILY, name="glm4_moe_lite", fields=deepseek_v3.FIELDS | {"mlp_layer_types"})
ABSENT = {"num_key_value_heads": 20}


def architecture(config: ConfigJson) -> Architecture:
    config = with_absent(config, ABSENT)
    return latent_architecture(config, FAMILY, grouped_experts(config), leading_dense_layers(config))
