"""MiMo-V2-Flash: layers of full attention between layers with a window, which have other key/value heads, another
rotation and sinks; values narrower than keys, and scaled; experts behind a dense first layer.

Source: transformers, models/mimo_v2_flash. The hub files spell much in their own way, for SGLang, and transformers
takes that for granted: such a field must say what transformers computes. Their layers for multi-token prediction are
not part of what the model computes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import FULL, SLIDING, Family, grouped_query, layer_kinds, read
from isoloss.models.families.hf_experts import (
    GROUPED_EXPERTS,
    MOE_IRRELEVANT,
    MOE_PINNED,
    grouped_experts,
    leading_dense_layers,
)
from isoloss.models.families.hf_fields import ConfigJson, positive_int, positive_number, refuse, with_absent
from isoloss.models.kinds.asymmetric import Asymmetric

PINNED = {
    **MOE_PINNED,
    "attention_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_shared_experts": None,
    "hybrid_block_size": None,
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
}
IRRELEVANT = MOE_IRRELEVANT | {"attention_chunk_size", "auto_map"}  # nothing attends by chunks
HUB_FIELDS = frozenset({
    "hybrid_layer_pattern", "moe_layer_freq", "layernorm_epsilon", "swa_rope_theta", "swa_num_attention_heads",
    "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim",
})  # fmt: skip
FIELDS = (GROUPED_EXPERTS - {"n_shared_experts", "first_k_dense_replace"}) | HUB_FIELDS | {
    "mlp_layer_types", "sliding_window", "sliding_window_size", "v_head_dim", "attention_value_scale",
}  # fmt: skip
VALUE_SCALE, ROTATED = 0.707, 0.334
FAMILY = Family("mimo_v2_flash", pinned=PINNED, irrelevant=IRRELEVANT, fields=FIELDS, rotary_fraction=ROTATED)
# What absent fields mean.
DEFAULTS: Mapping[str, Any] = {
    "head_dim": 192, "v_head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 129, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.0, "rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": ROTATED},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": ROTATED},
    },
}  # fmt: skip


def architecture(config: ConfigJson) -> Architecture:
    null = ("rope_parameters", "routed_scaling_factor")
    config = with_absent({**config, **_window(config)}, DEFAULTS, null=null)
    kinds = layer_kinds(config, lambda n: SLIDING if n and (n + 1) % 6 else FULL)
    config = {**config, "layer_types": kinds}
    full, windowed = (_attention(config, kind) for kind in (FULL, SLIDING))
    if full.heads % windowed.kv_heads:
        why = f"must divide num_attention_heads={full.heads} twice over: layers with a window have as many again"
        refuse("num_key_value_heads", full.kv_heads, why)
    if windowed.rotary_dim != full.rotary_dim:
        refuse("rope_parameters", config["rope_parameters"], "rotates other channels where there is a window")
    dense_layers = leading_dense_layers(config)
    arch = read(
        _rotating_as(config, FULL),
        FAMILY,
        {FULL: full, SLIDING: windowed},
        grouped_experts(config, shared=False),
        dense_layers=dense_layers,
        left_out=("model.mtp.",),
    )
    for name, meant in _by_the_hub(config, arch, full, windowed):
        if config.get(name) not in (None, meant):
            refuse(name, config[name], f"is not what transformers computes of this file, {meant!r}")
    return arch


def _attention(config: ConfigJson, kind: str) -> Asymmetric:
    """The attention of layers of a kind: with a window they have sinks, and twice the key/value heads."""
    rotating, scale = _rotating_as(config, kind), config.get("attention_value_scale", VALUE_SCALE)
    (full, sliding), value_dim = (FULL, SLIDING), positive_int(config, "v_head_dim")
    own = grouped_query(
        rotating,
        FAMILY,
        partial(Asymmetric, value_dim=value_dim),
        value_scale=1.0
        if scale is None
        else positive_number({"attention_value_scale": scale}, "attention_value_scale"),
    )
    if kind == full:
        return own[full]
    return replace(own[sliding], kv_heads=2 * own[full].kv_heads, sinks="attention_sink_bias")


def _window(config: ConfigJson) -> dict[str, int]:
    """The hub counts the tokens before the one that sees them."""
    if config.get("sliding_window_size") is None:
        return {}
    window = positive_int(config, "sliding_window_size") + 1
    if config.get("sliding_window") not in (None, window - 1, window):
        refuse("sliding_window", config["sliding_window"], f"contradicts sliding_window_size={window - 1}")
    return {"sliding_window": window}


def _rotating_as(config: ConfigJson, kind: str) -> ConfigJson:
    """With the rotation of layers of this kind alone."""
    given = config["rope_parameters"]
    if not isinstance(given, Mapping) or given.keys() != {FULL, SLIDING} or not isinstance(given[kind], Mapping):
        refuse("rope_parameters", given, f"must be an object of {FULL} and {SLIDING}, with the rotation of each")
    if given[kind].get("rope_type", "default") != "default":
        refuse(f"rope_parameters.{kind}.rope_type", given[kind]["rope_type"], "is not supported; only 'default' is")
    by_the_hub = ("rope_theta", "partial_rotary_factor")
    return {name: v for name, v in config.items() if name not in by_the_hub} | {"rope_parameters": given[kind]}


def _by_the_hub(
    config: ConfigJson, arch: Architecture, full: Asymmetric, windowed: Asymmetric
) -> Iterator[tuple[str, Any]]:
    """Fields of the hub's spelling, and what they must say."""
    yield "hybrid_layer_pattern", [int(kind == SLIDING) for kind in config["layer_types"]]
    yield "moe_layer_freq", [int(sparse) for sparse in arch.sparse]
    yield "layernorm_epsilon", arch.norm_eps
    yield "rope_theta", full.rope.theta
    yield "swa_rope_theta", windowed.rope.theta
    yield "partial_rotary_factor", config["rope_parameters"][FULL].get("partial_rotary_factor", ROTATED)
    yield "swa_num_attention_heads", full.heads
    yield "swa_num_key_value_heads", windowed.kv_heads
    yield "swa_head_dim", full.head_dim
    yield "swa_v_head_dim", full.value_dim
