"""Layers of Gated DeltaNet between layers of gated attention: what Qwen3-Next and all of Qwen3.5 share."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from isoloss.models.families.hf_config import FULL, LINEAR, Family, grouped_query, layer_kinds
from isoloss.models.families.hf_fields import ConfigJson, positive_int, refuse
from isoloss.models.kinds.gated_delta import GatedDelta
from isoloss.models.kinds.grouped_query import GatedQuery
from isoloss.models.kinds.kind import Attention

DELTA = frozenset({
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "full_attention_interval",
})  # fmt: skip
DELTA_PINNED: Mapping[str, Any] = MappingProxyType({"attention_bias": False})
# The arguments of `Family` that are the same in all of them.
GATED: Mapping[str, Any] = MappingProxyType({"head_dim_default": 256, "rotary_fraction": 0.25})


def with_layer_types(config: ConfigJson) -> ConfigJson:
    """Return `config` with `layer_types`. Absent ones mean attention in every
    `full_attention_interval`th layer."""
    interval = positive_int(config, "full_attention_interval") if config.get("full_attention_interval") else 4
    return {**config, "layer_types": layer_kinds(config, lambda layer: LINEAR if (layer + 1) % interval else FULL)}


def delta_attentions(config: ConfigJson, family: Family, *, woven: bool = False) -> dict[str, Attention]:
    """Return attention with an output gate, and Gated DeltaNet for the layers that have it."""
    key_heads, value_heads = (positive_int(config, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if value_heads % key_heads:
        refuse("linear_num_value_heads", value_heads, f"must be a multiple of linear_num_key_heads={key_heads}")
    delta = GatedDelta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=positive_int(config, "linear_key_head_dim"),
        value_dim=positive_int(config, "linear_value_head_dim"),
        conv_width=positive_int(config, "linear_conv_kernel_dim"),
        woven=woven,
    )
    return {**grouped_query(config, family, GatedQuery, qk_norm="head"), LINEAR: delta}
