"""Llama 2, 3, 3.1, 3.2 (text) and the models published as LlamaForCausalLM.

Source: transformers, models/llama/modeling_llama.py.
"""

from collections.abc import Mapping
from typing import Any

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import read

PINNED = {
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "is_llama_config": True,
    "sliding_window": None,
}


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a parsed config.json; raises UserError naming the field that is not supported."""
    return read(config, "llama", pinned=PINNED, qkv_bias=False, qk_norm=False, kv_heads_default=True)
