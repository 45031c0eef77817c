"""Llama 2, 3, 3.1, 3.2 (text) and the models published as LlamaForCausalLM.

Source: transformers, models/llama/modeling_llama.py.
"""

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import Family, grouped_query, read
from isoloss.models.families.hf_fields import ConfigJson

PINNED = {
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "is_llama_config": True,
    "sliding_window": None,
}
FAMILY = Family("llama", pinned=PINNED, kv_heads_default=True)


def architecture(config: ConfigJson) -> Architecture:
    return read(config, FAMILY, grouped_query(config, FAMILY))
