"""From a raw Hugging Face config.json to an `Architecture`: the plumbing that all families share.

The raw JSON is read in both spellings: transformers 4 (`rope_theta` + `rope_scaling`, `torch_dtype`) and
transformers 5 (`rope_parameters`, `dtype`). Each field of the file is either read, or pinned to the only value that is
supported, or known not to touch the maths. Any other field is refused by name: a field that nobody read may well be
the one that makes the model a different one.
"""

from collections.abc import Mapping, Set
from typing import Any, NoReturn

from isoloss.models.architecture import Architecture, LinearScaling, Llama3Scaling, Rope
from isoloss.parallel.errors import UserError

READ = frozenset({
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters", "torch_dtype", "dtype", "layer_types",
})  # fmt: skip

# Absent, null or exactly this value.
PINNED: Mapping[str, Any] = {
    "hidden_act": "silu", "attention_dropout": 0, "partial_rotary_factor": 1, "quantization_config": None,
    "is_encoder_decoder": False, "add_cross_attention": False, "tie_encoder_decoder": False, "pruned_heads": {},
    "auto_map": None,
}  # fmt: skip

# No influence on logits or gradients: token ids, generation defaults, how outputs are returned, bookkeeping.
IRRELEVANT = frozenset({
    "architectures", "transformers_version", "_name_or_path", "name_or_path", "_attn_implementation",
    "_attn_implementation_autoset", "attn_implementation", "unsloth_version", "unsloth_fixed", "transformers.js_config",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    "use_cache", "initializer_range", "torchscript", "use_bfloat16",
    "tf_legacy_loss", "return_dict", "output_hidden_states", "output_attentions", "output_scores",
    "return_dict_in_generate", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
    "task_specific_params", "tokenizer_class", "prefix", "is_decoder", "cross_attention_hidden_size",
    "chunk_size_feed_forward", "remove_invalid_values", "max_length", "min_length", "max_new_tokens", "do_sample",
    "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens",
})  # fmt: skip

DTYPES = ("float32", "bfloat16", "float16")
ROPE_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
DEFAULT_THETA = 10000.0  # what transformers takes where the file says nothing (Llama 1 and 2)


def read(
    config: Mapping[str, Any],
    family: str,
    *,
    pinned: Mapping[str, Any],
    irrelevant: Set[str] = frozenset(),
    qkv_bias: bool,
    qk_norm: bool,
    kv_heads_default: bool = False,
    head_dim_default: int | None = None,
) -> Architecture:
    """The architecture of `config`, the parsed config.json of a model of this family.

    pinned: fields of this family with the only value that is supported.
    irrelevant: fields of this family that mean nothing once the pinned ones have their value.
    kv_heads_default: an absent `num_key_value_heads` means as many as attention heads.
    head_dim_default: an absent `head_dim` means this; None: hidden_size / num_attention_heads.
    Raises UserError, beginning with "config.json: ", for a field that is missing, unknown or not supported.
    """
    pinned = {**PINNED, "model_type": family, **pinned}
    _refuse_unknown(config, family, READ | IRRELEVANT | irrelevant | set(pinned))
    for name, wanted in pinned.items():
        value = config.get(name)
        if value is not None and value != wanted:
            refuse(name, value, f"is not supported for {family}; only {wanted!r} is")
    num_layers, num_heads = _positive_int(config, "num_hidden_layers"), _positive_int(config, "num_attention_heads")
    _refuse_mixed_layers(config, num_layers)
    arch = Architecture(
        family=family,
        num_layers=num_layers,
        hidden_size=_positive_int(config, "hidden_size"),
        num_heads=num_heads,
        num_kv_heads=_kv_heads(config, num_heads, kv_heads_default),
        head_dim=_head_dim(config, num_heads, head_dim_default),
        intermediate_size=_positive_int(config, "intermediate_size"),
        vocab_size=_positive_int(config, "vocab_size"),
        norm_eps=_positive_number(config, "rms_norm_eps"),
        rope=_rope(config),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        tie_embeddings=_flag(config, "tie_word_embeddings"),
        max_positions=_positive_int(config, "max_position_embeddings"),
        dtype=_dtype(config),
    )
    if arch.num_heads % arch.num_kv_heads:
        refuse("num_key_value_heads", arch.num_kv_heads, f"must divide num_attention_heads={arch.num_heads}")
    return arch


def refuse(name: str, value: object, why: str) -> NoReturn:
    text = repr(value)
    raise UserError(f"config.json: {name}={text if len(text) <= 80 else text[:77] + '...'} {why}")


def _refuse_unknown(config: Mapping[str, Any], family: str, known: Set[str]) -> None:
    for name, value in config.items():
        if name not in known:
            refuse(
                name,
                value,
                f"is a field that the {family} family does not know, so the model may be a different "
                "one; delete it from config.json if it does not change what the model computes",
            )


def _refuse_mixed_layers(config: Mapping[str, Any], num_layers: int) -> None:
    layer_types = config.get("layer_types")
    if layer_types is None:
        return
    if not isinstance(layer_types, list):
        refuse("layer_types", layer_types, "must be a list with an entry for each layer")
    other = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if other:
        refuse("layer_types", other[0], "is not supported; only 'full_attention' is")
    if len(layer_types) != num_layers:
        refuse("layer_types", f"{len(layer_types)} entries", f"must have num_hidden_layers={num_layers} entries")


def _missing(name: str) -> NoReturn:
    raise UserError(f"config.json: {name} is missing; add it, as the model's authors published it")


def _positive_int(config: Mapping[str, Any], name: str, inside: str = "") -> int:
    value = config.get(name)
    if value is None:
        _missing(inside + name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        refuse(inside + name, value, "must be a positive integer")
    return value


def _positive_number(config: Mapping[str, Any], name: str, inside: str = "") -> float:
    value = config.get(name)
    if value is None:
        _missing(inside + name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        refuse(inside + name, value, "must be a positive number")
    return value


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        refuse(name, value, "must be true or false")
    return value


def _kv_heads(config: Mapping[str, Any], num_heads: int, may_be_absent: bool) -> int:
    if config.get("num_key_value_heads") is None and (may_be_absent or "num_key_value_heads" in config):
        return num_heads
    return _positive_int(config, "num_key_value_heads")


def _head_dim(config: Mapping[str, Any], num_heads: int, default: int | None) -> int:
    if config.get("head_dim") is not None:
        head_dim = _positive_int(config, "head_dim")
    elif default is not None:
        head_dim = default
    else:
        hidden_size = _positive_int(config, "hidden_size")
        if hidden_size % num_heads:
            refuse("hidden_size", hidden_size, f"is not a multiple of num_attention_heads={num_heads}; state head_dim")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        refuse("head_dim", head_dim, "must be even: rotary positions turn pairs of channels")
    return head_dim


def _dtype(config: Mapping[str, Any]) -> str:
    new, old = config.get("dtype"), config.get("torch_dtype")
    if new is not None and old is not None and new != old:
        refuse("dtype", new, f"contradicts torch_dtype={old!r}; keep one of them")
    value = new if new is not None else old
    if value is None:
        return "float32"
    if value not in DTYPES:
        refuse("dtype" if new is not None else "torch_dtype", value, f"is not supported; one of {', '.join(DTYPES)} is")
    return value


def _rope(config: Mapping[str, Any]) -> Rope:
    if config.get("rope_parameters") is not None and config.get("rope_scaling") is not None:
        refuse("rope_scaling", config["rope_scaling"], "stands beside rope_parameters; keep one of them")
    name = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    given = config.get(name)
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        refuse(name, given, "must be an object with rope_type and its parameters")
    inside = f"{name}."
    theta = _rope_theta(config, given, inside)
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("type", kind) != kind:
        refuse(inside + "type", given["type"], f"contradicts rope_type={kind!r}; keep one of them")
    if given.get("partial_rotary_factor", 1) not in (1, None):
        refuse(inside + "partial_rotary_factor", given["partial_rotary_factor"], "is not supported; only 1.0 is")
    if kind not in tuple(ROPE_PARAMETERS):  # a tuple: the file may hold something unhashable
        refuse(inside + "rope_type", kind, f"is not supported; one of {', '.join(ROPE_PARAMETERS)} is")
    for field, value in given.items():
        if field not in (*ROPE_PARAMETERS[kind], "rope_type", "type", "rope_theta", "partial_rotary_factor"):
            refuse(inside + field, value, f"is not a parameter of rope_type {kind!r} that is supported; delete it")
    return Rope(theta, _rope_scaling(kind, given, inside))


def _rope_scaling(kind: str, given: Mapping[str, Any], inside: str) -> Llama3Scaling | LinearScaling | None:
    if kind == "default":
        return None
    factor = _positive_number(given, "factor", inside)
    if kind == "linear":
        return LinearScaling(factor)
    low, high = (_positive_number(given, f"{end}_freq_factor", inside) for end in ("low", "high"))
    if high <= low:
        refuse(inside + "high_freq_factor", high, f"must be greater than low_freq_factor={low}")
    return Llama3Scaling(factor, low, high, _positive_int(given, "original_max_position_embeddings", inside))


def _rope_theta(config: Mapping[str, Any], given: Mapping[str, Any], inside: str) -> float:
    outer = config.get("rope_theta")
    if given.get("rope_theta") is not None:
        theta = _positive_number(given, "rope_theta", inside)
        if outer is not None and outer != theta:
            refuse("rope_theta", outer, f"contradicts {inside}rope_theta={theta}; keep one of them")
        return float(theta)
    return DEFAULT_THETA if outer is None else float(_positive_number(config, "rope_theta"))
