"""Qwen3 (dense, text): Llama with RMSNorm on queries and keys and a head width of its own.

Source: transformers, models/qwen3/modeling_qwen3.py.
"""

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import UNUSED_WINDOW, read
from isoloss.models.families.hf_fields import ConfigJson

PINNED = {"attention_bias": False, "use_sliding_window": False}


def architecture(config: ConfigJson) -> Architecture:
    return read(
        config, "qwen3", pinned=PINNED, irrelevant=UNUSED_WINDOW, qkv_bias=False, qk_norm=True, head_dim_default=128
    )
