"""Layers of Gated DeltaNet between layers of gated attention: what Qwen3-Next and all of Qwen3.5 share."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from isoloss.models.architecture import GatedDelta
from isoloss.models.families.hf_config import FULL, LINEAR, layer_kinds
from isoloss.models.families.hf_fields import ConfigJson, positive_int, refuse

DELTA = frozenset({
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "full_attention_interval",
})  # fmt: skip
DELTA_PINNED: Mapping[str, Any] = MappingProxyType({"attention_bias": False})
# The arguments of `hf_config.read` that are the same in all of them.
GATED: Mapping[str, Any] = MappingProxyType({
    "head_dim_default": 256,
    "rotary_fraction": 0.25,
    "qkv_bias": False,
    "qk_norm": True,
    "zero_centered_norm": True,
    "output_gate": True,
})  # fmt: skip


def gated_delta(config: ConfigJson, *, woven: bool = False) -> GatedDelta:
    """The layers of Gated DeltaNet of `config`. Absent `layer_types` mean attention in every so many layers."""
    interval = positive_int(config, "full_attention_interval") if config.get("full_attention_interval") else 4
    kinds = layer_kinds(
        config,
        positive_int(config, "num_hidden_layers"),
        lambda layer: LINEAR if (layer + 1) % interval else FULL,
    )
    key_heads, value_heads = (positive_int(config, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if value_heads % key_heads:
        refuse("linear_num_value_heads", value_heads, f"must be a multiple of linear_num_key_heads={key_heads}")
    return GatedDelta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=positive_int(config, "linear_key_head_dim"),
        value_dim=positive_int(config, "linear_value_head_dim"),
        conv_width=positive_int(config, "linear_conv_kernel_dim"),
        layers=tuple(kind == LINEAR for kind in kinds),
        woven=woven,
    )
