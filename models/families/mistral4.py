"""Mistral 4 (text): DeepSeek-V3's attention with queries that grow with their position, and experts chosen by softmax.

Source: transformers, models/mistral4/modeling_mistral4.py.
"""

from collections.abc import Mapping
from dataclasses import replace

from isoloss.models.architecture import Architecture
from isoloss.models.families import deepseek_v3
from isoloss.models.families.deepseek_v3 import PINNED, latent_architecture
from isoloss.models.families.hf_experts import first_dense_layers, grouped_experts
from isoloss.models.families.hf_fields import ConfigJson, positive_int, refuse, with_absent
from isoloss.models.kinds.experts import ExpertNames

ABSENT = {"num_key_value_heads": 32}
SOFTMAX = {**PINNED, "scoring_func": "softmax", "topk_method": None}
FAMILY = replace(deepseek_v3.FAMILY, name="mistral4", pinned=SOFTMAX, scaled_queries=True)
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def architecture(config: ConfigJson) -> Architecture:
    config = _of_rotated_channels(with_absent(config, ABSENT))
    experts = replace(grouped_experts(config), score="softmax", selection_bias=False, names=ExpertNames(stacked="rows"))
    return latent_architecture(config, FAMILY, experts, first_dense_layers(config))


def _of_rotated_channels(config: ConfigJson) -> ConfigJson:
    """The file gives the rotated part of a whole head, which `qk_rope_head_dim` is in any case."""
    name = "rope_scaling" if config.get("rope_scaling") is not None else "rope_parameters"
    given = YARN if config.get(name) is None else config[name]
    if not isinstance(given, Mapping):
        return config  # which `read` refuses
    rotated = positive_int(config, "qk_rope_head_dim")
    own = rotated / (rotated + positive_int(config, "qk_nope_head_dim"))
    fraction = given.get("partial_rotary_factor", own)
    if fraction != own:
        refuse(f"{name}.partial_rotary_factor", fraction, "is not qk_rope_head_dim's part of a head")
    return {**config, name: {field: value for field, value in given.items() if field != "partial_rotary_factor"}}
