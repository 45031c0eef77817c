"""Qwen3 (dense, text): Llama with RMSNorm on queries and keys and a head width of its own.

Source: transformers, models/qwen3/modeling_qwen3.py.
"""

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import UNUSED_WINDOW, Family, grouped_query, read
from isoloss.models.families.hf_fields import ConfigJson

PINNED = {"attention_bias": False, "use_sliding_window": False}
FAMILY = Family("qwen3", pinned=PINNED, irrelevant=UNUSED_WINDOW, head_dim_default=128)


def architecture(config: ConfigJson) -> Architecture:
    return read(config, FAMILY, grouped_query(config, FAMILY, qk_norm="head"))
