"""Mistral (dense, text): Llama in which a token may see only a sliding window of the last tokens.

Source: transformers, models/mistral/modeling_mistral.py.
"""

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import SLIDING, read
from isoloss.models.families.hf_fields import ConfigJson

FIELDS = frozenset({"sliding_window"})


def architecture(config: ConfigJson) -> Architecture:
    return read(
        config,
        "mistral",
        fields=FIELDS,
        kv_heads_default=True,
        layer_types_default=lambda layer: SLIDING,
        qkv_bias=False,
        qk_norm=False,
    )
