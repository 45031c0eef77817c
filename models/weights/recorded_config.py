"""What trainers note down of the model of a checkpoint: is it that of config.json? Megatron-Bridge does so in
`run_config.yaml`, Megatron-LM among its arguments (megatron_args).

Much of what tells models apart shows in no tensor: the base of the rotations, an epsilon, how experts are chosen.
Source of the names: Megatron-Core's TransformerConfig, and Megatron-Bridge's models/gpt_provider.py and
models/conversion/model_bridge.py. Fields that are absent are not compared.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from isoloss.models.architecture import Architecture, Experts, GatedDelta, Latent
from isoloss.models.rope import LinearScaling, Llama3Scaling, YarnScaling
from isoloss.models.weights import megatron_args
from isoloss.parallel.runtime.errors import UserError

NAME = "run_config.yaml"
# What null means. Any other field that is null is not compared.
_NULL: Mapping[str, Any] = {
    "num_moe_experts": 0, "moe_shared_expert_intermediate_size": 0, "moe_router_topk_scaling_factor": 1.0,
    "moe_router_num_groups": 1, "moe_router_group_topk": 1, "seq_len_interpolation_factor": 1.0, "rope_scaling": False,
    "q_lora_rank": 0,
}  # fmt: skip
Wanted = tuple[str, str, Any]  # a field of run_config.yaml, what config.json calls it, its value


def check(folder: Path, arch: Architecture) -> None:
    """Raises UserError naming the first field of what a checkpoint notes down of its model that `arch` has not.

    A model that is the same is refused where its weights are others: Megatron-Core itself, with layers of Gated
    DeltaNet, makes every norm zero-centered, also the one inside of them, whose weight is then stored minus 1; and
    Megatron-Bridge gives Gemma 4 a second copy of the keys to project values.
    """
    path, prefix = folder / NAME, "model."
    if path.is_file():
        said = _said(_model(path))
    else:
        path, prefix, said = folder / megatron_args.NAME, "", _said(megatron_args.read_model(folder))
    for name, label, wanted in _wanted(arch):
        if name in said and not _same(said[name], wanted):
            raise UserError(
                f"{path}: {prefix}{name}={said[name]!r} where config.json ({arch.family}) calls for "
                f"{label}={wanted!r}; the checkpoint is of another model: give the config.json of the one that was "
                "trained"
            )
    if arch.delta and said:
        raise UserError(
            f"{path}: Megatron-Core trained this {arch.family}, and stores the norms inside of Gated DeltaNet "
            "(out_norm) minus 1; export it to a Hugging Face folder there, and take that"
        )
    if arch.keys_as_values and said:
        raise UserError(
            f"{path}: Megatron-Bridge trained this {arch.family}, and stores a projection of values that the model has "
            "not; export it to a Hugging Face folder there, and take that"
        )


def hf_model(folder: Path) -> str | None:
    """The Hugging Face model that a checkpoint says it was made from."""
    path = folder / NAME
    model = _model(path) if path.is_file() else {}
    found = model.get("hf_model_id") or (model.get("extra_checkpoint_metadata") or {}).get("hf_model_id")
    return str(found) if found else None


def _model(path: Path) -> dict[str, Any]:
    """Its model. What newer versions nest under `transformer` stands beside the rest."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]
        return {**found, **found.get("transformer", {})}
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"{path} is damaged or not Megatron-Bridge's ({why}); copy it again, or delete it") from None


def _said(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as they are meant."""
    null = {
        **_NULL,
        "num_query_groups": model.get("num_attention_heads"),
        "moe_ffn_hidden_size": model.get("ffn_hidden_size"),
    }
    said = {name: null.get(name) if value is None else value for name, value in model.items()}
    said = {name: value for name, value in said.items() if value is not None}
    activation = said.get("activation_func")
    if isinstance(activation, dict):
        activation = activation.get("_target_")
    if activation is not None:
        said["activation_func"] = str(activation).rpartition(".")[2]
    every, layers = said.get("moe_layer_freq"), said.get("num_layers")
    if isinstance(every, int) and isinstance(layers, int) and every > 0:
        said["moe_layer_freq"] = [int(layer % every == 0) for layer in range(layers)]
    elif not isinstance(every, list):  # an expression
        said.pop("moe_layer_freq", None)
    linear = said.get("linear_attention_freq")
    if isinstance(linear, int) and isinstance(layers, int) and linear > 0:  # attention in every so many layers
        said["linear_attention_freq"] = [int((layer + 1) % linear > 0) for layer in range(layers)]
    if "low_freq_factor" in said and "scale_factor" in said:  # what earlier versions called Llama 3.1's scaling
        said |= {"rope_scaling": True, "rope_scaling_factor": said["scale_factor"]}
    if said.get("rope_type") == "rope":
        said.pop("rotary_scaling_factor", None)
    return said


def _same(one: Any, other: Any) -> bool:
    numbers = (int, float)
    if isinstance(one, numbers) and isinstance(other, numbers):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


def _wanted(arch: Architecture) -> Iterator[Wanted]:
    yield "num_layers", "num_hidden_layers", arch.num_layers
    yield "hidden_size", "hidden_size", arch.hidden_size
    yield "num_attention_heads", "num_attention_heads", arch.num_heads
    yield "vocab_size", "vocab_size", arch.vocab_size
    yield "layernorm_epsilon", "rms_norm_eps", arch.norm_eps
    thetas = [rope.theta for rope in reversed(arch.ropes)]
    yield "rotary_base", "rope_theta", thetas if arch.windowed else arch.rope.theta
    yield "share_embeddings_and_output_weights", "tie_word_embeddings", arch.tie_embeddings
    yield "normalization", "normalization", "RMSNorm"
    yield "layernorm_zero_centered_gamma", "layernorm_zero_centered_gamma", arch.zero_centered_norm
    yield "gated_linear_unit", "gated_linear_unit", True
    activation = "quick_gelu" if arch.clamped_swiglu else "fast_gelu" if arch.geglu else "silu"
    yield "activation_func", "hidden_act", activation
    yield "add_bias_linear", "mlp_bias", arch.linear_bias
    if not arch.linear_bias:
        yield "add_qkv_bias", "attention_bias", arch.qkv_bias
    if all(arch.sinks):  # where some layers have none, it is not noted down
        yield "softmax_type", "softmax_type", "learnable" if arch.sinks else "vanilla"
    yield "multi_latent_attention", "multi_latent_attention", arch.latent is not None
    yield from _attention(arch) if arch.latent is None else _latent(arch, arch.latent)
    if arch.experts is None or arch.experts.dense_layers:
        yield "ffn_hidden_size", "intermediate_size", arch.intermediate_size
    yield "num_moe_experts", "num_experts", arch.experts.count if arch.experts else 0
    if arch.experts:
        yield from _experts(arch, arch.experts)


def _attention(arch: Architecture) -> Iterator[Wanted]:
    scaling = arch.rope.scaling
    if arch.windowed is None:  # else it is of one kind of layer or the other
        yield "num_query_groups", "num_key_value_heads", arch.num_kv_heads
        yield "kv_channels", "head_dim", arch.head_dim
    yield "qk_layernorm", "use_qk_norm", arch.qk_norm and not arch.joint_qk_norm
    yield "rotary_percent", "partial_rotary_factor", arch.rotary_dim / arch.head_dim
    yield "attention_output_gate", "attn_output_gate", arch.output_gate
    if arch.delta:
        yield from _delta(arch.delta)
    yield "rotary_interleaved", "rope_interleave", arch.rope.interleaved
    yield "position_embedding_type", "rope_type", "yarn" if isinstance(scaling, YarnScaling) else "rope"
    yield "rope_scaling", "rope_type=llama3", isinstance(scaling, Llama3Scaling)
    linear = scaling.factor if isinstance(scaling, LinearScaling) else 1.0
    yield "seq_len_interpolation_factor", "rope_scaling.factor", linear
    if isinstance(scaling, Llama3Scaling):
        yield "rope_scaling_factor", "rope_scaling.factor", scaling.factor
    if isinstance(scaling, YarnScaling):
        yield "yarn_rotary_scaling_factor", "rope_scaling.factor", scaling.factor


def _delta(delta: GatedDelta) -> Iterator[Wanted]:
    yield "linear_conv_kernel_dim", "linear_conv_kernel_dim", delta.conv_width
    yield "linear_key_head_dim", "linear_key_head_dim", delta.key_dim
    yield "linear_value_head_dim", "linear_value_head_dim", delta.value_dim
    yield "linear_num_key_heads", "linear_num_key_heads", delta.key_heads
    yield "linear_num_value_heads", "linear_num_value_heads", delta.value_heads
    yield "linear_attention_freq", "layer_types", [int(linear) for linear in delta.layers]


def _latent(arch: Architecture, latent: Latent) -> Iterator[Wanted]:
    yield "q_lora_rank", "q_lora_rank", latent.q_rank or 0
    yield "kv_lora_rank", "kv_lora_rank", latent.kv_rank
    yield "qk_head_dim", "qk_nope_head_dim", latent.nope_dim
    yield "qk_pos_emb_head_dim", "qk_rope_head_dim", latent.rope_dim
    yield "v_head_dim", "v_head_dim", latent.value_dim
    scaling = arch.rope.scaling
    if isinstance(scaling, YarnScaling):
        yield "rope_type", "rope_type", "yarn"
    yield "rotary_scaling_factor", "rope_scaling.factor", scaling.factor if isinstance(scaling, YarnScaling) else 1.0


def _experts(arch: Architecture, experts: Experts) -> Iterator[Wanted]:
    yield "moe_router_topk", "num_experts_per_tok", experts.top_k
    yield "moe_ffn_hidden_size", "moe_intermediate_size", experts.intermediate_size
    yield "moe_shared_expert_intermediate_size", "n_shared_experts*moe_intermediate_size", experts.shared_size
    yield "moe_shared_expert_gate", "shared_expert_gate", experts.shared_gate
    yield "moe_router_score_function", "scoring_func", experts.score
    yield "moe_router_enable_expert_bias", "e_score_correction_bias", experts.selection_bias
    yield "moe_router_topk_scaling_factor", "routed_scaling_factor", experts.scaling
    yield "moe_router_num_groups", "n_group", experts.groups
    yield "moe_router_group_topk", "topk_group", experts.groups_kept
    yield "moe_layer_freq", "first_k_dense_replace", [int(arch.has_experts(i)) for i in range(arch.num_layers)]
    if experts.score == "softmax" and experts.top_k > 1:
        yield "moe_router_pre_softmax", "not norm_topk_prob", not experts.normalize
