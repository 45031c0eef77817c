"""From a raw Hugging Face config.json to an `Architecture`: the plumbing that all families share.

The raw JSON is read in both spellings: transformers 4 (`rope_theta` + `rope_scaling`, `torch_dtype`) and
transformers 5 (`rope_parameters`, `dtype`). Each field of the file is either read, or pinned to the only value that is
supported, or known not to touch the maths. Any other field is refused by name: a field that nobody read may well be
the one that makes the model a different one.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from isoloss.models.architecture import MTP_LAYERS, Architecture
from isoloss.models.families.hf_fields import ConfigJson, flag, number_of, positive_int, positive_number, refuse
from isoloss.models.families.hf_rope import DEFAULT_THETA, SCALED_QUERIES, rope, rotary_dim, scaled_queries
from isoloss.models.kinds.dense import Dense
from isoloss.models.kinds.experts import Experts
from isoloss.models.kinds.grouped_query import Grouped, GroupedQuery
from isoloss.models.kinds.kind import Activation, Attention
from isoloss.models.kinds.layer import Layer
from isoloss.models.rope import Rope

READ = frozenset({
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters", "torch_dtype", "dtype", "layer_types", "partial_rotary_factor",
})  # fmt: skip

# Absent or exactly this value; or null where the value is one that counts as false, as null does to the code that reads
# it.
PINNED: Mapping[str, Any] = {
    "hidden_act": "silu", "attention_dropout": 0, "quantization_config": None,
    "is_encoder_decoder": False, "add_cross_attention": False, "tie_encoder_decoder": False, "pruned_heads": {},
    "auto_map": None,
}  # fmt: skip

# No influence on logits: token ids, generation defaults, how outputs are returned, bookkeeping. transformers gives the
# embedding's row of pad_token_id no gradient; isoloss trains it like any other.
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

# The hub files of Qwen carry a window next to use_sliding_window=false.
UNUSED_WINDOW = frozenset({"sliding_window", "max_window_layers"})

DTYPES = ("float32", "bfloat16", "float16")
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
TEXT_MODEL = "model.language_model."  # what the files of a multimodal model call its text model
# Fields of a multimodal model next to its text_config.
_AROUND_TEXT = IRRELEVANT | {
    "text_config", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """The fields of a family's config.json, and the meaning of absent ones.

    pinned: fields of this family with the only value that is supported.
    irrelevant: fields of this family that mean nothing once the pinned ones have their value.
    fields: fields that the family reads itself. With `sliding_window` among them layers may have a window, with
        `linear_num_key_heads` they may be Gated DeltaNet.
    rope_irrelevant: fields within rope_parameters, otherwise like `irrelevant`.
    scaled_queries: rope_parameters hold Llama 4's scaling of queries.
    kv_heads_default: an absent `num_key_value_heads` means as many as attention heads, as null does in any case.
    head_dim_default: value of an absent `head_dim`; None: hidden_size / num_attention_heads where it is absent or
        null.
    rotary_fraction: value of an absent `partial_rotary_factor`; None: the family rotates whole heads only.
    theta_default: value of an absent `rope_theta`.
    layer_types_default: kind of each layer where `layer_types` is absent.
    """

    name: str
    pinned: Mapping[str, Any] = field(default_factory=dict)
    irrelevant: Set[str] = frozenset()
    fields: Set[str] = frozenset()
    rope_irrelevant: Set[str] = frozenset()
    scaled_queries: bool = False
    kv_heads_default: bool = False
    head_dim_default: int | None = None
    rotary_fraction: float | None = None
    theta_default: float = DEFAULT_THETA
    layer_types_default: Callable[[int], str] = lambda layer: FULL

    def rope(self, config: ConfigJson, *, interleaved: bool = False) -> Rope:
        irrelevant = self.rope_irrelevant | (SCALED_QUERIES if self.scaled_queries else frozenset())
        max_positions = positive_int(config, "max_position_embeddings")
        found = rope(config, self.theta_default, max_positions, interleaved=interleaved, irrelevant=irrelevant)
        return scaled_queries(config, found) if self.scaled_queries else found


def read(
    config: ConfigJson,
    family: Family,
    attentions: Mapping[str, Attention],
    experts: Experts | None = None,
    *,
    dense_layers: int = 0,
    activation: Activation = "swiglu",
    **known: Any,
) -> Architecture:
    """Return the architecture of `config`, the parsed config.json of a model of this family.

    attentions: the attention of each kind of layer that `layer_types` may name.
    experts: they take the place of the dense MLP, but for the first `dense_layers` layers.
    activation: activation of a dense MLP.
    known: fields of `Architecture` that the family sets.
    Raises UserError, beginning with "config.json: ", for a field that is missing, unknown or not supported.
    """
    check_fields(config, family)
    dense = Dense(positive_int(config, "intermediate_size"), activation)
    kinds = layer_kinds(config, family.layer_types_default)
    other = sorted({str(kind) for kind in kinds} - attentions.keys())
    if other:
        refuse("layer_types", other[0], f"is not supported; one of {', '.join(attentions)} is")
    mlps = [dense if experts is None or layer < dense_layers else experts for layer in range(len(kinds))]
    return Architecture(
        family=family.name,
        layers=tuple(Layer(attentions[kind], mlp) for kind, mlp in zip(kinds, mlps)),
        hidden_size=positive_int(config, "hidden_size"),
        vocab_size=positive_int(config, "vocab_size"),
        norm_eps=positive_number(config, "rms_norm_eps"),
        tie_embeddings=flag(config, "tie_word_embeddings"),
        max_positions=positive_int(config, "max_position_embeddings"),
        dtype=_dtype(config),
        mtp_layers=number_of(config, *(name for name in MTP_LAYERS if name in family.fields)),
        **known,
    )


def grouped_query(
    config: ConfigJson, family: Family, kind: Callable[..., Grouped] = GroupedQuery, **known: Any
) -> dict[str, Any]:
    """Return the attention of layers with and without a window. known: fields of `kind` that the family sets."""
    check_fields(config, family)
    heads = positive_int(config, "num_attention_heads")
    head_dim = _head_dim(config, heads, family.head_dim_default)
    rotated = rotary_dim(config, head_dim, family.rotary_fraction)
    kv_heads, rotation = _kv_heads(config, heads, family.kv_heads_default), family.rope(config)
    if rotation.cos_sin_factor != 1 and rotated != head_dim:
        refuse("partial_rotary_factor", rotated / head_dim, "together with YaRN's attention factor is not supported")
    full = kind(heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rotation, rotary_dim=rotated, **known)
    if "sliding_window" not in family.fields:
        return {FULL: full}
    if SLIDING not in layer_kinds(config, family.layer_types_default) or (
        config.get("sliding_window") is None and config.get("layer_types") is None
    ):
        return {FULL: full, SLIDING: full}
    return {FULL: full, SLIDING: replace(full, window=positive_int(config, "sliding_window"))}


def check_fields(config: ConfigJson, family: Family) -> None:
    """Refuse fields that the family does not know, and values of pinned ones that are not supported."""
    _check_fields(config, family.name, READ | family.irrelevant | IRRELEVANT | family.fields, family.irrelevant,
                  family.pinned)  # fmt: skip


def _check_fields(
    config: ConfigJson, family: str, known: Set[str], irrelevant: Set[str], pinned: Mapping[str, Any]
) -> None:
    pinned = {k: value for k, value in {**PINNED, "model_type": family, **pinned}.items() if k not in irrelevant}
    unknown = (
        f"is a field that the {family} family does not know, so the model may be a different one; delete it from "
        "config.json if it does not change what the model computes"
    )
    for name, value in config.items():
        if name not in known and name not in pinned:
            refuse(name, value, unknown)
    for name, wanted in pinned.items():
        value = config.get(name)
        if name in config and value != wanted and (value is not None or wanted):
            quantized = "; the weights are quantized, so let transformers write a bfloat16 copy first"
            hint = quantized if name == "quantization_config" else ""
            refuse(name, value, f"is not supported for {family}; only {wanted!r} is{hint}")


def layer_kinds(config: ConfigJson, default: Callable[[int], str]) -> list[str]:
    """Return `layer_types`, or the default of each layer."""
    num_layers, layer_types = positive_int(config, "num_hidden_layers"), config.get("layer_types")
    if layer_types is None:
        layer_types = [default(layer) for layer in range(num_layers)]
    if not isinstance(layer_types, list):
        refuse("layer_types", layer_types, "must be a list with an entry for each layer")
    if len(layer_types) != num_layers:
        refuse("layer_types", f"{len(layer_types)} entries", f"must have num_hidden_layers={num_layers} entries")
    return layer_types


def text_config(config: ConfigJson, family: str, *, irrelevant: Set[str] = frozenset()) -> ConfigJson:
    """Return the configuration of the text model in a multimodal model's config.json.

    family: the model_type of the multimodal model. irrelevant: fields of it, next to text_config, that say nothing of
        text.
    Raises UserError, as `read`, and where the two contradict each other.
    """
    inner = config["text_config"]
    if not isinstance(inner, Mapping):
        refuse("text_config", inner, "must be an object: the configuration of the text model")
    shared = ("tie_word_embeddings", "dtype", "torch_dtype")
    _check_fields(config, family, _AROUND_TEXT | irrelevant | {*shared}, frozenset(), {})
    for name in shared:
        if inner.get(name) is not None and config.get(name) not in (None, inner[name]):
            refuse(name, config[name], f"contradicts text_config.{name}={inner[name]!r}; keep one of them")
    # Of the dtype one spelling is enough, and the two may be in one place each.
    return {name: config[name] for name in shared if config.get(name) is not None} | dict(inner)


def _kv_heads(config: ConfigJson, num_heads: int, may_be_absent: bool) -> int:
    if config.get("num_key_value_heads") is None and (may_be_absent or "num_key_value_heads" in config):
        return num_heads
    num_kv_heads = positive_int(config, "num_key_value_heads")
    if num_heads % num_kv_heads:
        refuse("num_key_value_heads", num_kv_heads, f"must divide num_attention_heads={num_heads}")
    return num_kv_heads


def _head_dim(config: ConfigJson, num_heads: int, default: int | None) -> int:
    if config.get("head_dim") is not None:
        head_dim = positive_int(config, "head_dim")
    elif default is not None:
        if "head_dim" in config:
            refuse("head_dim", None, f"means nothing; state it, or leave it out for {default}")
        head_dim = default
    else:
        hidden_size = positive_int(config, "hidden_size")
        if hidden_size % num_heads:
            refuse("hidden_size", hidden_size, f"is not a multiple of num_attention_heads={num_heads}; state head_dim")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        refuse("head_dim", head_dim, "must be even: rotary positions turn pairs of channels")
    return head_dim


def _dtype(config: ConfigJson) -> str:
    new, old = config.get("dtype"), config.get("torch_dtype")
    if new is not None and old is not None and new != old:
        refuse("dtype", new, f"contradicts torch_dtype={old!r}; keep one of them")
    value = new if new is not None else old
    if value is None:
        return "float32"
    if value not in DTYPES:
        refuse("dtype" if new is not None else "torch_dtype", value, f"is not supported; one of {', '.join(DTYPES)} is")
    return value
