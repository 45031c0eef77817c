"""Ministral 3 (dense, text): Mistral with YaRN, and queries that grow with their position.

Source: transformers, models/ministral3/modeling_ministral3.py.
"""

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import SLIDING, Family, grouped_query, read
from isoloss.models.families.hf_fields import ConfigJson, with_absent

FIELDS = frozenset({"sliding_window"})
ABSENT = {"num_key_value_heads": 8}
YARN = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
FAMILY = Family(
    "ministral3", fields=FIELDS, scaled_queries=True, head_dim_default=128, layer_types_default=lambda layer: SLIDING
)


def architecture(config: ConfigJson) -> Architecture:
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = {**config, "rope_parameters": YARN}
    config = with_absent(config, ABSENT)
    return read(config, FAMILY, grouped_query(config, FAMILY))
