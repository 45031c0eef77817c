"""Qwen3.5, 3.6 and 3.8 with a mixture of experts (text): Qwen3.5's layers, with a shared expert that has a gate.

Source: transformers, models/qwen3_5_moe/modeling_qwen3_5_moe.py. The weights of the chosen experts always add up to 1.
"""

from dataclasses import replace

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import TEXT_MODEL, Family, read, text_config
from isoloss.models.families.hf_delta import GATED, delta_attentions, with_layer_types
from isoloss.models.families.hf_experts import MOE_IRRELEVANT, MOE_PINNED, SHARED_EXPERT, experts
from isoloss.models.families.hf_fields import ConfigJson, positive_int
from isoloss.models.families.qwen3_5_text import FIELDS, IRRELEVANT, LEFT_OUT, PINNED, ROPE_IRRELEVANT
from isoloss.models.kinds.experts import ExpertNames

FAMILY = Family(
    "qwen3_5_moe_text",
    pinned={**PINNED, **MOE_PINNED},
    irrelevant=IRRELEVANT | MOE_IRRELEVANT,
    fields=FIELDS | SHARED_EXPERT,
    rope_irrelevant=ROPE_IRRELEVANT,
    **GATED,
)


def architecture(config: ConfigJson) -> Architecture:
    if "text_config" in config:
        text = architecture(text_config(config, "qwen3_5_moe"))
        return replace(text, tensor_prefix=TEXT_MODEL, text_class="Qwen3_5MoeForCausalLM")
    # No layer has a dense MLP.
    config = with_layer_types({"intermediate_size": config.get("moe_intermediate_size"), **config})
    moe = experts(
        config,
        count=("num_experts", "num_local_experts"),
        score="softmax",
        normalize=True,
        shared_size=positive_int(config, "shared_expert_intermediate_size"),
        shared_gate=True,
        names=ExpertNames(shared="shared_expert", stacked="rows"),
    )
    attentions = delta_attentions(config, FAMILY)
    return read(config, FAMILY, attentions, moe, zero_centered_norm=True, left_out=LEFT_OUT)
