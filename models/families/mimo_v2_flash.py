"""MiMo-V2-Flash: layers of full attention between layers with a window, which have other key/value heads, another
rotation and sinks; values narrower than keys, and scaled; experts behind a dense first layer.

Source: transformers, models/mimo_v2_flash/modeling_mimo_v2_flash.py. The hub files have their own spelling, which
transformers takes for granted in part: fields of it are read here as SGLang reads them (models/mimo_v2_flash.py). Their
layers for multi-token prediction are not part of what the model computes.
"""

from collections.abc import Mapping
from typing import Any

from isoloss.models.architecture import Architecture, Values, Windowed
from isoloss.models.families.hf_config import FULL, SLIDING, layer_kinds, read
from isoloss.models.families.hf_experts import (
    GROUPED_EXPERTS,
    MOE_IRRELEVANT,
    MOE_PINNED,
    experts,
    leading_dense_layers,
)
from isoloss.models.families.hf_fields import ConfigJson, flag, positive_int, positive_number, refuse
from isoloss.models.families.hf_rope import rope
from isoloss.models.rope import Rope

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
# How the hub's own code was to chunk its attention, which it does not.
IRRELEVANT = MOE_IRRELEVANT | {"attention_chunk_size", "auto_map"}
FIELDS = (GROUPED_EXPERTS - {"n_shared_experts", "first_k_dense_replace"}) | {
    "mlp_layer_types", "moe_layer_freq", "hybrid_layer_pattern", "layernorm_epsilon", "sliding_window",
    "sliding_window_size", "v_head_dim", "attention_value_scale", "swa_num_attention_heads",
    "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim", "swa_rope_theta",
}  # fmt: skip
HEAD_DIM, VALUE_DIM, ROTATED, THETA = 192, 128, 0.334, {FULL: 5e6, SLIDING: 1e4}
# The hub's spelling of a field, that of transformers, and what a number of the first is in the second.
LAYERS: tuple[tuple[str, str, tuple[str, str]], ...] = (
    ("hybrid_layer_pattern", "layer_types", (FULL, SLIDING)),
    ("moe_layer_freq", "mlp_layer_types", ("dense", "sparse")),
)


def architecture(config: ConfigJson) -> Architecture:
    config = _respelled(config)
    num_layers = positive_int(config, "num_hidden_layers")
    windowed = [kind == SLIDING for kind in layer_kinds(config, num_layers, _layer_type)]
    arch = read(
        _of_layers(config, FULL),
        "mimo_v2_flash",
        pinned=PINNED,
        irrelevant=IRRELEVANT,
        fields=FIELDS,
        head_dim_default=HEAD_DIM,
        rotary_fraction=ROTATED,
        theta_default=THETA[FULL],
        layer_types_default=_layer_type,
        qkv_bias=False,
        qk_norm=False,
        sinks=tuple(windowed),
        sinks_name="attention_sink_bias",
        values=_values(config),
        experts=experts(
            config,
            count=("n_routed_experts", "num_local_experts", "num_experts"),
            score="sigmoid",
            normalize=flag(config, "norm_topk_prob", True),
            scaling=_or(config, "routed_scaling_factor", 1.0),
            selection_bias=True,
            groups=int(_or(config, "n_group", 1)),
            groups_kept=int(_or(config, "topk_group", 1)),
            dense_layers=leading_dense_layers(config),
        ),
        windowed=Windowed(_windowed_kv_heads(config), _windowed_rope(config)),
        left_out=("model.mtp.",),
    )
    for name, wanted in (
        ("swa_num_attention_heads", arch.num_heads), ("swa_head_dim", arch.head_dim),
        ("swa_v_head_dim", arch.value_dim),
    ):  # fmt: skip
        if config.get(name) not in (None, wanted):
            refuse(name, config[name], f"is not supported; layers with a window have {wanted} like the others")
    return arch


def _layer_type(layer: int) -> str:
    return FULL if layer == 0 or (layer + 1) % 6 == 0 else SLIDING


def _or(config: ConfigJson, name: str, default: float) -> float:
    return default if config.get(name) is None else positive_number(config, name)


def _respelled(config: ConfigJson) -> ConfigJson:
    """As transformers spells it. A file may have both: transformers writes what it read, too."""
    given = dict(config)
    for hub, ours, kinds in LAYERS:
        numbers = config.get(hub)
        if numbers is None:
            continue
        if not isinstance(numbers, list) or any(n not in (0, 1) for n in numbers):
            refuse(hub, numbers, "must be a list of 0 and 1")
        layers = [kinds[n] for n in numbers]
        if config.get(ours) not in (None, layers):
            refuse(hub, numbers, f"contradicts {ours}; keep one of them")
        given[ours] = layers
    if config.get("layernorm_epsilon") is not None:
        epsilon = positive_number(config, "layernorm_epsilon")
        if config.get("rms_norm_eps") not in (None, epsilon):
            refuse("layernorm_epsilon", epsilon, "contradicts rms_norm_eps; keep one of them")
        given["rms_norm_eps"] = epsilon
    if config.get("sliding_window_size") is not None:  # of tokens before the one that sees them
        size = positive_int(config, "sliding_window_size")
        if config.get("sliding_window") not in (None, size, size + 1):
            refuse("sliding_window", config["sliding_window"], f"contradicts sliding_window_size={size}")
        given["sliding_window"] = size + 1
    return given


def _of_layers(config: ConfigJson, kind: str) -> ConfigJson:
    """With the rotation of layers of this kind alone, where `rope_parameters` have one for each."""
    given = config.get("rope_parameters")
    if not isinstance(given, Mapping) or not {FULL, SLIDING} & set(given):
        return config
    other = sorted(set(given) - {FULL, SLIDING})
    if other:
        refuse(f"rope_parameters.{other[0]}", given[other[0]], "stands beside those of the kinds of layers")
    return {**config, "rope_parameters": given.get(kind) or {}}


def _windowed_rope(config: ConfigJson) -> Rope:
    own: dict[str, Any] = dict(_of_layers(config, SLIDING))
    own.pop("rope_theta", None)
    if config.get("swa_rope_theta") is not None:
        own["rope_theta"] = config["swa_rope_theta"]
    return rope(own, THETA[SLIDING], positive_int(config, "max_position_embeddings"), interleaved=False)


def _windowed_kv_heads(config: ConfigJson) -> int:
    heads, others = positive_int(config, "num_attention_heads"), positive_int(config, "num_key_value_heads")
    own = 2 * others if config.get("swa_num_key_value_heads") is None else config["swa_num_key_value_heads"]
    if not isinstance(own, int) or own <= 0 or heads % own:
        refuse("swa_num_key_value_heads", own, f"must divide num_attention_heads={heads}")
    return own


def _values(config: ConfigJson) -> Values:
    scale = 1.0 if config.get("attention_value_scale", 0.707) is None else _or(config, "attention_value_scale", 0.707)
    return Values(int(_or(config, "v_head_dim", VALUE_DIM)), scale)
