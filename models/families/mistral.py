"""Mistral (dense, text): Llama in which a token may see only a sliding window of the last tokens.

Source: transformers, models/mistral/modeling_mistral.py.
"""

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import SLIDING, Family, grouped_query, read
from isoloss.models.families.hf_fields import ConfigJson, with_absent

FIELDS = frozenset({"sliding_window"})
ABSENT = {"sliding_window": 4096, "num_key_value_heads": 8}
FAMILY = Family("mistral", fields=FIELDS, layer_types_default=lambda layer: SLIDING)


def architecture(config: ConfigJson) -> Architecture:
    config = with_absent(config, ABSENT)
    return read(config, FAMILY, grouped_query(config, FAMILY))
