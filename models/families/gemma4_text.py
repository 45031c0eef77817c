"""Gemma 4 (text): layers with a window, and every sixth one without, which has wider and fewer key/value heads, values
that are its keys, and a rotation that turns a quarter of the channels. Sparse models add experts to every MLP.

Source: transformers, models/gemma4. The hub files are of a multimodal model, whose towers are left out. They
describe layers without a window by `global_head_dim` and `num_global_key_value_heads`; transformers writes
`per_layer_config`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from isoloss.models.architecture import Architecture
from isoloss.models.families.hf_config import (
    FULL,
    SLIDING,
    TEXT_MODEL,
    Family,
    grouped_query,
    layer_kinds,
    read,
    text_config,
)
from isoloss.models.families.hf_fields import ConfigJson, flag, positive_int, positive_number, refuse, with_absent
from isoloss.models.families.hf_rope import rope
from isoloss.models.kinds.asymmetric import Asymmetric
from isoloss.models.kinds.dense_and_experts import DenseAndExperts
from isoloss.models.rope import Proportional, Rope

PINNED: Mapping[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "rope_theta": None, "rope_scaling": None,
    "partial_rotary_factor": None,
}  # fmt: skip
# What is not built, where it says anything else than this.
REFUSED: Mapping[str, tuple[Any, str]] = {
    "num_kv_shared_layers": (0, "layers that read the keys and values of earlier ones (E2B, E4B)"),
    "hidden_size_per_layer_input": (0, "embeddings of each layer (E2B, E4B)"),
}
IRRELEVANT = frozenset({
    # Of what is refused.
    "vocab_size_per_layer_input", "use_double_wide_mlp",
})  # fmt: skip
FIELDS = frozenset(REFUSED) | {
    "sliding_window", "attention_k_eq_v", "final_logit_softcapping", "global_head_dim", "num_global_key_value_heads",
    "per_layer_config", "use_bidirectional_attention", "enable_moe_block", "num_experts", "top_k_experts",
    "moe_intermediate_size", "expert_intermediate_size",
}  # fmt: skip
AROUND_TEXT = frozenset({
    "audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index", "eoi_token_id",
    "vision_soft_tokens_per_image",
})  # fmt: skip
LEFT_OUT = tuple(f"model.{name}." for name in ("vision_tower", "embed_vision", "audio_tower", "embed_audio"))
# What absent fields mean.
DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256, "rms_norm_eps": 1e-6, "sliding_window": 512, "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}  # fmt: skip
GLOBAL_HEAD_DIM, PER_LAYER_INPUT = 512, 256
FAMILY = Family("gemma4_text", pinned=PINNED, irrelevant=IRRELEVANT, fields=FIELDS)


def architecture(config: ConfigJson) -> Architecture:
    if "text_config" in config:
        text = architecture(text_config(config, "gemma4", irrelevant=AROUND_TEXT))
        return replace(text, tensor_prefix=TEXT_MODEL, text_class="Gemma4ForCausalLM")
    _refuse_what_is_not_built(config)
    heads = positive_int(config, "num_attention_heads")
    config = with_absent(config, DEFAULTS, null=("rope_parameters",))
    config = {**config, "tie_word_embeddings": flag(config, "tie_word_embeddings", True)}
    layers = positive_int(config, "num_hidden_layers")
    kinds = layer_kinds(config, lambda n: SLIDING if (n + 1) % 6 and n + 1 < layers else FULL)
    if kinds[-1] != FULL:
        refuse("layer_types", kinds[-1], f"is the last layer's kind, which transformers takes for {FULL}")
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        if config.get(name) is not None and heads % positive_int(config, name):
            refuse(name, config[name], f"must divide num_attention_heads={heads}")
    own, softcap = _without_window(config, kinds), config.get("final_logit_softcapping")
    rotations = {
        kind: _rotation(config, kind, positive_int(config, "max_position_embeddings")) for kind in (FULL, SLIDING)
    }
    config = {**config, "layer_types": kinds, "rope_parameters": None}
    full, windowed = (_attention(each)[kind] for each, kind in (({**config, **own}, FULL), (config, SLIDING)))
    full = replace(full, keys_as_values=flag(config, "attention_k_eq_v"))
    arch = read(
        config,
        FAMILY,
        {kind: replace(attention, rope=rotations[kind]) for kind, attention in ((FULL, full), (SLIDING, windowed))},
        _experts(config) if flag(config, "enable_moe_block", False) else None,
        activation="geglu",
        scaled_embedding=True,
        logit_softcap=None if softcap is None else float(positive_number(config, "final_logit_softcapping")),
        left_out=LEFT_OUT,
    )
    return arch.with_layers(lambda layer: replace(layer, sandwich=True, scalar=True))


def _attention(config: ConfigJson) -> dict[str, Asymmetric]:
    """The attention of layers with and without a window, whose heads `config` describes. Values are as wide as keys."""
    kind = partial(Asymmetric, value_dim=positive_int(config, "head_dim"), value_norm=True, softmax_scale=1.0)
    return grouped_query(config, FAMILY, kind, qk_norm="head")


def _experts(config: ConfigJson) -> DenseAndExperts:
    moe = DenseAndExperts(
        count=positive_int(config, "num_experts"),
        top_k=positive_int(config, "top_k_experts"),
        intermediate_size=positive_int(config, "moe_intermediate_size"),
        shared_size=positive_int(config, "intermediate_size"),
        activation="geglu",
    )
    if moe.top_k > moe.count:
        refuse("top_k_experts", moe.top_k, f"exceeds num_experts={moe.count}")
    if config.get("expert_intermediate_size") not in (None, moe.intermediate_size):
        why = f"contradicts moe_intermediate_size={moe.intermediate_size}; keep one of them"
        refuse("expert_intermediate_size", config["expert_intermediate_size"], why)
    return moe


def _refuse_what_is_not_built(config: ConfigJson) -> None:
    config = {"hidden_size_per_layer_input": PER_LAYER_INPUT, **config}
    for name, (built, what) in REFUSED.items():
        if config.get(name) not in (None, built):
            refuse(name, config[name], f"is not supported; {what} are not built")
    if config.get("use_bidirectional_attention") not in (None, "vision"):
        why = "is not supported; a token of text sees those before it alone"
        refuse("use_bidirectional_attention", config["use_bidirectional_attention"], why)


def _without_window(config: ConfigJson, kinds: list[str]) -> dict[str, int]:
    """`head_dim` and `num_key_value_heads` of layers without a window."""
    per_layer = config.get("per_layer_config")
    if per_layer is None:
        found = {"head_dim": GLOBAL_HEAD_DIM if config.get("global_head_dim") is None else config["global_head_dim"]}
        if flag(config, "attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
            found["num_key_value_heads"] = config["num_global_key_value_heads"]
        return found
    keys = {"head_dim", "num_key_value_heads"}
    if not isinstance(per_layer, Mapping) or any(
        not str(layer).isdigit() or not isinstance(each, Mapping) or not each.keys() <= keys
        for layer, each in per_layer.items()
    ):
        refuse("per_layer_config", per_layer, "must hold head_dim and num_key_value_heads of layers, and nothing else")
    by_layer = {int(layer): each for layer, each in per_layer.items()}  # transformers leaves out what others have too
    own = by_layer.get(len(kinds) - 1, {})
    if by_layer != {layer: own for layer, kind in enumerate(kinds) if kind == FULL and own}:
        refuse("per_layer_config", per_layer, f"must hold the same for each {FULL} layer, and nothing else")
    for name, of_hub in (("head_dim", "global_head_dim"), ("num_key_value_heads", "num_global_key_value_heads")):
        said = own.get(name, config.get(name))
        if config.get(of_hub) not in (None, said):
            refuse(of_hub, config[of_hub], f"contradicts per_layer_config, by which {name} is {said!r}")
    return dict(own)


def _rotation(config: ConfigJson, kind: str, max_positions: int) -> Rope:
    given = config["rope_parameters"]
    if not isinstance(given, Mapping) or given.keys() != {FULL, SLIDING} or not isinstance(given[kind], Mapping):
        refuse("rope_parameters", given, f"must be an object of {FULL} and {SLIDING}, with the rotation of each")
    own, name = dict(given[kind]), f"rope_parameters.{kind}."
    wanted = "proportional" if kind == FULL else "default"
    if own.pop("rope_type", None) != wanted:
        refuse(f"{name}rope_type", given[kind].get("rope_type"), f"is not supported; only {wanted!r} is")
    fraction = positive_number({"partial_rotary_factor": 1.0, **own}, "partial_rotary_factor", name)
    if fraction > 1 or (kind == SLIDING and fraction != 1):
        refuse(f"{name}partial_rotary_factor", fraction, "is not supported")
    own.pop("partial_rotary_factor", None)
    positive_number(own, "rope_theta", name)
    plain = rope({"rope_parameters": own}, 1e4, max_positions, interleaved=False)
    return plain if kind == SLIDING else replace(plain, scaling=Proportional(float(fraction)))
