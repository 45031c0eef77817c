"""Qwen2 and Qwen2.5 (dense, text): Llama with a bias on q, k and v.

Source: transformers, models/qwen2/modeling_qwen2.py.
"""

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import UNUSED_WINDOW, Family, grouped_query, read
from isoloss.models.families.hf_fields import ConfigJson

PINNED = {"use_sliding_window": False, "use_mrope": False}
FAMILY = Family("qwen2", pinned=PINNED, irrelevant=UNUSED_WINDOW)


def architecture(config: ConfigJson) -> Architecture:
    return read(config, FAMILY, grouped_query(config, FAMILY, qkv_bias=True))
