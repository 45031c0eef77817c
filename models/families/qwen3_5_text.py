"""Qwen3.5, 3.6 and 3.8, dense (text): three of four layers are Gated DeltaNet, the fourth has gated attention.

Source: transformers, models/qwen3_5/modeling_qwen3_5.py. The hub files are of a multimodal model, whose vision tower
and layer for multi-token prediction are left out. Text has three equal position ids, for which its rotary embedding is
the plain one.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import TEXT_MODEL, Family, read, text_config
from isoloss.models.families.hf_delta import DELTA, DELTA_PINNED, GATED, delta_attentions, with_layer_types
from isoloss.models.families.hf_fields import ConfigJson

PINNED: Mapping[str, Any] = MappingProxyType({
    **DELTA_PINNED, "attn_output_gate": True, "output_gate_type": "swish", "mtp_use_dedicated_embeddings": False,
    "mlp_only_layers": [],
})  # fmt: skip
FIELDS = DELTA | {"mtp_num_hidden_layers"}
IRRELEVANT = frozenset({"mamba_ssm_dtype"})  # in what type a server keeps its states
ROPE_IRRELEVANT = frozenset({"mrope_section", "mrope_interleaved"})
LEFT_OUT = ("mtp.", "model.visual.")
FAMILY = Family(
    "qwen3_5_text", pinned=PINNED, irrelevant=IRRELEVANT, fields=FIELDS, rope_irrelevant=ROPE_IRRELEVANT, **GATED
)


def architecture(config: ConfigJson) -> Architecture:
    if "text_config" in config:
        text = architecture(text_config(config, "qwen3_5"))
        return replace(text, tensor_prefix=TEXT_MODEL, text_class="Qwen3_5ForCausalLM")
    config = with_layer_types(config)
    return read(config, FAMILY, delta_attentions(config, FAMILY), zero_centered_norm=True, left_out=LEFT_OUT)
