"""Qwen2 and Qwen2.5 (dense, text): Llama with a bias on q, k and v.

Source: transformers, models/qwen2/modeling_qwen2.py.
"""

from collections.abc import Mapping
from typing import Any

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import read

PINNED = {"use_sliding_window": False, "use_mrope": False}
# The hub files carry a window next to use_sliding_window=false.
IRRELEVANT = frozenset({"sliding_window", "max_window_layers"})


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a parsed config.json; raises UserError naming the field that is not supported."""
    return read(config, "qwen2", pinned=PINNED, irrelevant=IRRELEVANT, qkv_bias=True, qk_norm=False)
