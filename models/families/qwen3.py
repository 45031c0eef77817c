"""Qwen3 (dense, text): Llama with RMSNorm on queries and keys and a head width of its own.

Source: transformers, models/qwen3/modeling_qwen3.py.
"""

from collections.abc import Mapping
from typing import Any

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import read

PINNED = {"attention_bias": False, "use_sliding_window": False}
# The hub files carry a window next to use_sliding_window=false.
IRRELEVANT = frozenset({"sliding_window", "max_window_layers"})


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a parsed config.json; raises UserError naming the field that is not supported."""
    return read(
        config, "qwen3", pinned=PINNED, irrelevant=IRRELEVANT, qkv_bias=False, qk_norm=True, head_dim_default=128
    )
