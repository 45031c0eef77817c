"""From a raw Hugging Face config.json to an `Architecture`: the plumbing that all families share.

The raw JSON is read in both spellings: transformers 4 (`rope_theta` + `rope_scaling`, `torch_dtype`) and
transformers 5 (`rope_parameters`, `dtype`). Each field of the file is either read, or pinned to the only value that is
supported, or known not to touch the maths. Any other field is refused by name: a field that nobody read may well be
the one that makes the model a different one.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from isoloss.models.architecture import (
    Architecture,
    Experts,
    Latent,
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
)
from isoloss.parallel.errors import UserError

READ = frozenset({
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters", "torch_dtype", "dtype", "layer_types", "partial_rotary_factor",
})  # fmt: skip

# Absent, null or exactly this value.
PINNED: Mapping[str, Any] = {
    "hidden_act": "silu", "attention_dropout": 0, "quantization_config": None,
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
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor",
             "mscale", "mscale_all_dim"),
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_THETA = 10000.0  # what transformers takes where the file says nothing (Llama 1 and 2)


def read(
    config: Mapping[str, Any],
    family: str,
    *,
    pinned: Mapping[str, Any] = MappingProxyType({}),
    irrelevant: Set[str] = frozenset(),
    fields: Set[str] = frozenset(),
    kv_heads_default: bool = False,
    head_dim_default: int | None = None,
    rotary_fraction: float | None = None,
    theta_default: float = DEFAULT_THETA,
    layer_types_default: Callable[[int], str] = lambda layer: FULL,
    latent: Latent | None = None,
    **known: Any,
) -> Architecture:
    """The architecture of `config`, the parsed config.json of a model of this family.

    pinned: fields of this family with the only value that is supported.
    irrelevant: fields of this family that mean nothing once the pinned ones have their value.
    fields: what the family reads itself. known: fields of `Architecture` that the family sets.
    kv_heads_default: an absent `num_key_value_heads` means as many as attention heads.
    head_dim_default: an absent `head_dim` means this; None: hidden_size / num_attention_heads.
    rotary_fraction: what an absent `partial_rotary_factor` means; None: the family rotates whole heads only.
    theta_default: what an absent `rope_theta` means.
    layer_types_default: what an absent `layer_types` means for each layer.
    Raises UserError, beginning with "config.json: ", for a field that is missing, unknown or not supported.
    """
    pinned = {
        name: value for name, value in {**PINNED, "model_type": family, **pinned}.items() if name not in irrelevant
    }
    _refuse_unknown(config, family, READ | IRRELEVANT | irrelevant | fields | set(pinned))
    for name, wanted in pinned.items():
        value = config.get(name)
        if value is not None and value != wanted:
            refuse(name, value, f"is not supported for {family}; only {wanted!r} is")
    num_layers, num_heads = positive_int(config, "num_hidden_layers"), positive_int(config, "num_attention_heads")
    max_positions = positive_int(config, "max_position_embeddings")
    if latent is None:
        head_dim = _head_dim(config, num_heads, head_dim_default)
        rotary_dim = _rotary_dim(config, head_dim, rotary_fraction)
    else:
        head_dim, rotary_dim = latent.nope_dim + latent.rope_dim, latent.rope_dim
    arch = Architecture(
        family=family,
        num_layers=num_layers,
        hidden_size=positive_int(config, "hidden_size"),
        num_heads=num_heads,
        num_kv_heads=_kv_heads(config, num_heads, kv_heads_default),
        head_dim=head_dim,
        intermediate_size=positive_int(config, "intermediate_size"),
        vocab_size=positive_int(config, "vocab_size"),
        norm_eps=positive_number(config, "rms_norm_eps"),
        rope=_rope(config, theta_default, max_positions, interleaved=latent is not None),
        tie_embeddings=flag(config, "tie_word_embeddings"),
        max_positions=max_positions,
        dtype=_dtype(config),
        rotary_dim=rotary_dim,
        windows=_windows(config, num_layers, layer_types_default, "sliding_window" in fields),
        latent=latent,
        mtp_layers=_count(config, *(name for name in MTP_LAYERS if name in fields)),
        **known,
    )
    if arch.num_heads % arch.num_kv_heads:
        refuse("num_key_value_heads", arch.num_kv_heads, f"must divide num_attention_heads={arch.num_heads}")
    if arch.rope.cos_sin_factor != 1 and latent is None and rotary_dim != head_dim:
        refuse("partial_rotary_factor", rotary_dim / head_dim, "together with YaRN's attention factor is not supported")
    return arch


def experts(
    config: Mapping[str, Any],
    *,
    count: Sequence[str],
    intermediate_size: str = "moe_intermediate_size",
    score: Literal["softmax", "sigmoid"],
    normalize: bool,
    **known: Any,
) -> Experts:
    """The mixture of experts of `config`. count: the spellings of the field that holds the number of experts."""
    present = [name for name in count if config.get(name) is not None]
    number = positive_int(config, (present or count)[0])
    for name in present[1:]:
        if config[name] != number:
            refuse(name, config[name], f"contradicts {present[0]}={number}; keep one of them")
    found = Experts(
        count=number,
        top_k=positive_int(config, "num_experts_per_tok"),
        intermediate_size=positive_int(config, intermediate_size),
        score=score,
        normalize=normalize,
        **known,
    )
    if number % found.groups:
        refuse("n_group", found.groups, f"must divide the number of experts, {number}")
    if found.groups_kept > found.groups:
        refuse("topk_group", found.groups_kept, f"must not exceed n_group={found.groups}")
    if found.groups > 1 and number // found.groups < 2:
        refuse("n_group", found.groups, f"leaves groups of fewer than two of the {number} experts")
    if found.top_k > number // found.groups * found.groups_kept:
        refuse("num_experts_per_tok", found.top_k, f"exceeds the experts that can be chosen, of {number}")
    return found


def grouped_experts(config: Mapping[str, Any]) -> Experts:
    """The experts of DeepSeek-V3 and its followers: sigmoid scores with a selection bias, groups, shared experts."""
    return experts(
        config,
        count=("n_routed_experts", "num_local_experts", "num_experts"),
        score="sigmoid",
        normalize=flag(config, "norm_topk_prob", True),
        scaling=positive_number(config, "routed_scaling_factor"),
        selection_bias=True,
        groups=positive_int(config, "n_group"),
        groups_kept=positive_int(config, "topk_group"),
        shared_size=positive_int(config, "n_shared_experts") * positive_int(config, "moe_intermediate_size"),
        dense_layers=_count(config, "first_k_dense_replace"),
    )


# Two spellings.
MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
# The fields of a model with `grouped_experts`.
GROUPED_EXPERTS = frozenset({
    "n_routed_experts", "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace",
    *MTP_LAYERS,
})  # fmt: skip
MOE_IRRELEVANT = frozenset({
    "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size",
})  # fmt: skip
# Transformers would return the router's logits, or add its balancing loss to the loss.
MOE_PINNED = MappingProxyType({"output_router_logits": False, "router_jitter_noise": 0})


def _count(config: Mapping[str, Any], *spellings: str) -> int:
    """A field that may be 0, under one of its spellings; absent means 0."""
    for name in spellings:
        value = config.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                refuse(name, value, "must be a whole number, at least 0")
            return value
    return 0


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


def _windows(
    config: Mapping[str, Any], num_layers: int, default: Callable[[int], str], sliding: bool
) -> tuple[int | None, ...]:
    """For each layer, how many tokens a token sees; () where every layer sees all."""
    layer_types = config.get("layer_types")
    if layer_types is None:
        layer_types = [default(layer) for layer in range(num_layers)]
    if not isinstance(layer_types, list):
        refuse("layer_types", layer_types, "must be a list with an entry for each layer")
    supported = (FULL, SLIDING) if sliding else (FULL,)
    other = sorted({str(kind) for kind in layer_types} - set(supported))
    if other:
        refuse("layer_types", other[0], f"is not supported; one of {', '.join(supported)} is")
    if len(layer_types) != num_layers:
        refuse("layer_types", f"{len(layer_types)} entries", f"must have num_hidden_layers={num_layers} entries")
    if SLIDING not in layer_types or (config.get("sliding_window") is None and config.get("layer_types") is None):
        return ()
    window = positive_int(config, "sliding_window")
    return tuple(window if kind == SLIDING else None for kind in layer_types)


def _missing(name: str) -> NoReturn:
    raise UserError(f"config.json: {name} is missing; add it, as the model's authors published it")


def positive_int(config: Mapping[str, Any], name: str, inside: str = "") -> int:
    value = config.get(name)
    if value is None:
        _missing(inside + name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        refuse(inside + name, value, "must be a positive integer")
    return value


def positive_number(config: Mapping[str, Any], name: str, inside: str = "") -> float:
    value = config.get(name)
    if value is None:
        _missing(inside + name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        refuse(inside + name, value, "must be a positive number")
    return value


def flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        refuse(name, value, "must be true or false")
    return value


def _kv_heads(config: Mapping[str, Any], num_heads: int, may_be_absent: bool) -> int:
    if config.get("num_key_value_heads") is None and (may_be_absent or "num_key_value_heads" in config):
        return num_heads
    return positive_int(config, "num_key_value_heads")


def _head_dim(config: Mapping[str, Any], num_heads: int, default: int | None) -> int:
    if config.get("head_dim") is not None:
        head_dim = positive_int(config, "head_dim")
    elif default is not None:
        head_dim = default
    else:
        hidden_size = positive_int(config, "hidden_size")
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


def _rotary_dim(config: Mapping[str, Any], head_dim: int, default: float | None) -> int:
    given = config.get("rope_parameters") or config.get("rope_scaling")
    inner = given.get("partial_rotary_factor") if isinstance(given, Mapping) else None
    outer = config.get("partial_rotary_factor")
    if inner is not None and outer is not None and inner != outer:
        refuse("partial_rotary_factor", outer, f"contradicts rope_parameters.partial_rotary_factor={inner!r}")
    fraction = inner if outer is None else outer
    if fraction is None:
        fraction = 1 if default is None else default
    if default is None and fraction != 1:
        refuse("partial_rotary_factor", fraction, "is not supported for this family; only 1.0 is")
    if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 < fraction <= 1:
        refuse("partial_rotary_factor", fraction, "must be a number greater than 0 and at most 1")
    if int(head_dim * fraction) % 2 or not int(head_dim * fraction):
        refuse("partial_rotary_factor", fraction, f"rotates an odd number of the {head_dim} channels of a head")
    return int(head_dim * fraction)


def _rope(config: Mapping[str, Any], theta_default: float, max_positions: int, interleaved: bool) -> Rope:
    if config.get("rope_parameters") is not None and config.get("rope_scaling") is not None:
        refuse("rope_scaling", config["rope_scaling"], "stands beside rope_parameters; keep one of them")
    name = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    given = config.get(name)
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        refuse(name, given, "must be an object with rope_type and its parameters")
    inside = f"{name}."
    theta = _rope_theta(config, given, inside, theta_default)
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("type", kind) != kind:
        refuse(inside + "type", given["type"], f"contradicts rope_type={kind!r}; keep one of them")
    if kind not in tuple(ROPE_PARAMETERS):  # a tuple: the file may hold something unhashable
        refuse(inside + "rope_type", kind, f"is not supported; one of {', '.join(ROPE_PARAMETERS)} is")
    for field, value in given.items():
        if field not in (*ROPE_PARAMETERS[kind], "rope_type", "type", "rope_theta", "partial_rotary_factor"):
            refuse(inside + field, value, f"is not a parameter of rope_type {kind!r} that is supported; delete it")
    return Rope(theta, _rope_scaling(kind, given, inside, max_positions, latent=interleaved), interleaved)


def _rope_scaling(
    kind: str, given: Mapping[str, Any], inside: str, max_positions: int, latent: bool
) -> Llama3Scaling | LinearScaling | YarnScaling | None:
    if kind == "default":
        return None
    factor = positive_number(given, "factor", inside)
    if kind == "linear":
        return LinearScaling(factor)
    if kind == "yarn":
        return _yarn(given, factor, inside, max_positions, latent)
    low, high = (positive_number(given, f"{end}_freq_factor", inside) for end in ("low", "high"))
    if high <= low:
        refuse(inside + "high_freq_factor", high, f"must be greater than low_freq_factor={low}")
    return Llama3Scaling(factor, low, high, positive_int(given, "original_max_position_embeddings", inside))


def _yarn(given: Mapping[str, Any], factor: float, inside: str, max_positions: int, latent: bool) -> YarnScaling:
    """transformers' defaults and its use of mscale; only latent attention scales its softmax by mscale_all_dim."""
    optional = {name: given.get(name) for name in ("attention_factor", "beta_fast", "beta_slow")}
    fast, slow = (
        default if optional[name] is None else positive_number(given, name, inside)
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    mscale, all_dim = (given.get(name) or 0.0 for name in ("mscale", "mscale_all_dim"))
    for name, value in (("mscale", mscale), ("mscale_all_dim", all_dim)):
        if not isinstance(value, int | float) or isinstance(value, bool):
            refuse(inside + name, value, "must be a number")

    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    if optional["attention_factor"] is not None:
        cos_sin = float(positive_number(given, "attention_factor", inside))
    else:
        cos_sin = scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)
    original = given.get("original_max_position_embeddings")
    if original is not None:
        original = positive_int(given, "original_max_position_embeddings", inside)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=max_positions if original is None else original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=flag(given, "truncate", True),
        cos_sin_factor=cos_sin,
        softmax_factor=scale(all_dim) ** 2 if latent and all_dim else 1.0,
    )


def _rope_theta(config: Mapping[str, Any], given: Mapping[str, Any], inside: str, default: float) -> float:
    outer = config.get("rope_theta")
    if given.get("rope_theta") is not None:
        theta = positive_number(given, "rope_theta", inside)
        if outer is not None and outer != theta:
            refuse("rope_theta", outer, f"contradicts {inside}rope_theta={theta}; keep one of them")
        return float(theta)
    return default if outer is None else float(positive_number(config, "rope_theta"))
