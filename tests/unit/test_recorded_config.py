"""run_config.yaml of Megatron-Bridge beside config.json: the same model is taken, any other is refused by its field."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.models.families import FAMILIES, MODELS, published, write_config

from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import read_architecture
from isoloss.models.weights import recorded_config
from isoloss.parallel.runtime.errors import UserError

# What Megatron-Bridge makes of a config.json: CONFIG_MAPPING of its models/conversion/model_bridge.py.
MAPPED = {
    "num_hidden_layers": "num_layers", "hidden_size": "hidden_size", "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads", "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels", "vocab_size": "vocab_size", "max_position_embeddings": "seq_length",
    "rms_norm_eps": "layernorm_epsilon", "tie_word_embeddings": "share_embeddings_and_output_weights",
    "attention_bias": "add_qkv_bias", "mlp_bias": "add_bias_linear", "use_qk_norm": "qk_layernorm",
    "num_experts": "num_moe_experts", "num_local_experts": "num_moe_experts",
    "n_routed_experts": "num_moe_experts", "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size", "n_group": "moe_router_num_groups",
    "topk_group": "moe_router_group_topk", "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim", "v_head_dim": "v_head_dim",
}  # fmt: skip
# What the bridge of a family sets beside those, and the defaults of GPTModelProvider and TransformerConfig.
DEFAULTS = {
    "normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False, "add_qkv_bias": False,
    "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False}, "qk_layernorm": False,
    "layernorm_zero_centered_gamma": False, "softmax_type": "vanilla", "multi_latent_attention": False,
    "rotary_interleaved": False, "position_embedding_type": "rope", "rotary_percent": 1.0, "rope_scaling": False,
    "rope_scaling_factor": 1.0, "seq_len_interpolation_factor": None, "num_moe_experts": None, "moe_layer_freq": 1,
    "moe_ffn_hidden_size": None, "moe_shared_expert_intermediate_size": None, "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False, "moe_router_num_groups": None,
    "moe_router_group_topk": None, "moe_router_topk_scaling_factor": None, "moe_router_topk": 2,
}  # fmt: skip
GROUPED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
LATENT = {**GROUPED, "qk_layernorm": True, "multi_latent_attention": True, "moe_router_pre_softmax": True}
# Megatron-Bridge's providers of Qwen3-Next and Qwen3.5 set these.
DELTA: dict[str, Any] = {
    "qk_layernorm": True, "layernorm_zero_centered_gamma": True, "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 14, "linear_value_head_dim": 10, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "rotary_percent": 0.4,
}  # fmt: skip
SET: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": True, "rope_scaling_factor": 4.0},
    "qwen2": {"add_qkv_bias": True},
    "qwen2-yarn": {"add_qkv_bias": True, "position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0},
    "qwen3": {"qk_layernorm": True},
    "gemma-4": {"qk_layernorm": True, "rotary_base": [100.0, 1e4],
                "activation_func": {"_target_": "megatron.core.activations.fast_gelu", "_call_": False}},
    "gemma-4-moe": {"qk_layernorm": True, "rotary_base": [100.0, 1e4], "moe_shared_expert_intermediate_size": 72,
                    "moe_router_pre_softmax": False, "moe_router_topk": 3, "num_moe_experts": 6,
                    "activation_func": {"_target_": "megatron.core.activations.fast_gelu", "_call_": False}},
    "qwen3-moe": {"qk_layernorm": True},
    "qwen3-moe-unnormalized": {"qk_layernorm": True, "moe_router_pre_softmax": True},
    "deepseek-v3": {**LATENT, "moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 2 * 28,
                    "rope_type": "yarn", "rotary_scaling_factor": 4.0},
    "deepseek-v3-plain": {**LATENT, "moe_shared_expert_intermediate_size": 28, "rotary_scaling_factor": 1.0},
    "glm-4.5": {**GROUPED, "moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 28, "rotary_percent": 0.5},
    "glm-4.7-flash": {**LATENT, "moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 28,
                      "rotary_scaling_factor": 1.0},
    "ministral-3": {"position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0},
    "mistral-4": {"qk_layernorm": True, "multi_latent_attention": True, "moe_layer_freq": [0, 1],
                  "moe_shared_expert_intermediate_size": 28, "rope_type": "yarn", "rotary_scaling_factor": 4.0},
    "minimax-m2": {**GROUPED, "moe_ffn_hidden_size": 40, "rotary_percent": 12 / 20},
    "mimo-v2-flash": {**GROUPED, "moe_layer_freq": [0, 1], "rotary_percent": 0.6, "rotary_base": [100.0, 5e6]},
    "qwen3.5": {**DELTA, "ffn_hidden_size": 72},
    "qwen3.5-moe": {**DELTA, "moe_shared_expert_intermediate_size": 36, "moe_shared_expert_gate": True},
    "qwen3-next": {**DELTA, "moe_shared_expert_intermediate_size": 36, "moe_shared_expert_gate": True},
    "gpt-oss": {"add_bias_linear": True, "add_qkv_bias": True, "softmax_type": "learnable",
                "activation_func": {"_target_": "megatron.core.activations.quick_gelu", "_call_": False},
                "position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0},
}  # fmt: skip


def provider(name: str) -> dict[str, Any]:
    """The model of the run_config.yaml for a config.json of the table of families."""
    config = published(name)
    rotation = config["rope_parameters"]
    mapped = {theirs: config[ours] for ours, theirs in MAPPED.items() if config.get(ours) is not None}
    return {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        **DEFAULTS,
        "rotary_base": rotation.get("full_attention", rotation)["rope_theta"],
        **mapped,
        **SET.get(name, {}),
    }


def write(folder: Path, model: object) -> Path:
    (folder / recorded_config.NAME).write_text(yaml.safe_dump({"model": model, "train": {"train_iters": 3}}))
    return folder


@pytest.fixture
def arch(tmp_path):
    def of(name: str) -> Architecture:
        return read_architecture(write_config(tmp_path / "hf", published(name)))

    return of


OTHER_WEIGHTS = {
    "qwen3.5": "out_norm", "qwen3.5-moe": "out_norm", "qwen3-next": "out_norm", "gemma-4": "of values",
    "gemma-4-moe": "of values",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in MODELS if name not in OTHER_WEIGHTS])
def test_the_same_model_is_taken(name, arch, tmp_path):
    recorded_config.check(write(tmp_path, provider(name)), arch(name))


@pytest.mark.parametrize("name", OTHER_WEIGHTS)
def test_the_same_model_with_other_weights_is_refused(name, arch, tmp_path):
    with pytest.raises(UserError, match=OTHER_WEIGHTS[name]):
        recorded_config.check(write(tmp_path, provider(name)), arch(name))


def test_a_folder_without_one_is_taken(arch, tmp_path):
    recorded_config.check(tmp_path, arch("qwen3"))


@pytest.mark.parametrize("name", FAMILIES)
def test_no_two_families_are_taken_for_each_other(name, arch, tmp_path):
    ours = arch(name)
    for other in FAMILIES:
        if other != name:
            with pytest.raises(UserError, match=r"run_config.yaml: model\.\w+=.* where config.json \(\w+\) calls for"):
                recorded_config.check(write(tmp_path, provider(other)), ours)


CHANGES = {
    "qwen3": {
        "num_layers": 3, "hidden_size": 50, "num_attention_heads": 8, "vocab_size": 308, "layernorm_epsilon": 1e-6,
        "rotary_base": 1000000, "share_embeddings_and_output_weights": True, "normalization": "LayerNorm",
        "layernorm_zero_centered_gamma": True, "gated_linear_unit": False, "add_bias_linear": True,
        "activation_func": {"_target_": "torch.nn.functional.gelu", "_call_": False}, "add_qkv_bias": True,
        "softmax_type": "off-by-one", "multi_latent_attention": True, "num_query_groups": None, "kv_channels": 12,
        "qk_layernorm": False, "rotary_percent": 0.5, "rotary_interleaved": True, "rope_scaling": True,
        "position_embedding_type": "learned_absolute", "seq_len_interpolation_factor": 2.0, "ffn_hidden_size": 81,
        "num_moe_experts": 4,
    },
    "llama": {"rope_scaling": False, "rope_scaling_factor": 8.0},
    "qwen2-yarn": {"position_embedding_type": "rope", "yarn_rotary_scaling_factor": 8.0},
    "qwen3-moe": {
        "num_moe_experts": None, "moe_router_topk": 2, "moe_ffn_hidden_size": None, "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": 28, "moe_router_score_function": "sigmoid", "moe_layer_freq": 2,
        "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5,
    },
    "qwen3.5-moe": {
        "layernorm_zero_centered_gamma": False, "attention_output_gate": False, "linear_attention_freq": 4,
        "linear_conv_kernel_dim": 3, "linear_key_head_dim": 15, "linear_value_head_dim": 11, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "moe_shared_expert_gate": False,
    },
    "deepseek-v3": {
        "q_lora_rank": None, "kv_lora_rank": 21, "qk_head_dim": 13, "qk_pos_emb_head_dim": 9, "v_head_dim": 15,
        "rope_type": "rope", "rotary_scaling_factor": 40, "moe_router_num_groups": None, "moe_router_group_topk": 1,
        "moe_layer_freq": [1, 1], "ffn_hidden_size": 73,
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in CHANGES.items() for field in fields])
def test_any_other_value_is_refused_with_both(name, field, arch, tmp_path):
    changed = {**provider(name), field: CHANGES[name][field]}
    with pytest.raises(UserError) as refused:
        recorded_config.check(write(tmp_path, changed), arch(name))
    assert f"run_config.yaml: model.{field}=" in str(refused.value) and "\n" not in str(refused.value)


def test_the_line_names_file_field_and_both_values(arch, tmp_path):
    ours = arch("qwen3")
    with pytest.raises(UserError) as refused:
        recorded_config.check(write(tmp_path, {**provider("qwen3"), "rotary_base": 5e5}), ours)
    assert str(refused.value) == (
        f"{tmp_path}/run_config.yaml: model.rotary_base=500000.0 where config.json (qwen3) calls for "
        "rope_theta=10000.0; the checkpoint is of another model: give the config.json of the one that was trained"
    )


def test_fields_may_be_nested_or_absent(arch, tmp_path):
    """Newer versions of Megatron-Bridge keep those of the transformer apart, and activations by a name."""
    flat, ours = provider("qwen3"), arch("qwen3")
    outer = {name: flat.pop(name) for name in ("vocab_size", "rotary_base", "_target_")}
    model = {**outer, "transformer": {**flat, "activation_func": "silu"}, "extra_checkpoint_metadata": None}
    recorded_config.check(write(tmp_path, model), ours)
    recorded_config.check(write(tmp_path, {"num_layers": 2, "num_query_groups": None, "kv_channels": None}), ours)
    model["transformer"]["num_layers"] = 5
    with pytest.raises(
        UserError, match=r"model.num_layers=5 where config.json \(qwen3\) calls for num_hidden_layers=2"
    ):
        recorded_config.check(write(tmp_path, model), ours)


def test_llamas_scaling_under_its_earlier_names(arch, tmp_path):
    earlier = {**provider("llama"), "scale_factor": 4.0, "low_freq_factor": 1.0, "old_context_len": 8192}
    ours = arch("llama")
    recorded_config.check(write(tmp_path, {**earlier, "rope_scaling": False, "rope_scaling_factor": 1.0}), ours)
    with pytest.raises(UserError, match=r"model.rope_scaling_factor=8.0 where .* calls for rope_scaling.factor=4.0"):
        recorded_config.check(write(tmp_path, {**earlier, "scale_factor": 8.0}), ours)


def test_the_hugging_face_model_is_known_by_either_field(tmp_path):
    assert recorded_config.hf_model(tmp_path) is None
    assert recorded_config.hf_model(write(tmp_path, {"hf_model_id": "Qwen/Qwen3-0.6B"})) == "Qwen/Qwen3-0.6B"
    nested = {"extra_checkpoint_metadata": {"hf_model_id": "Qwen/Qwen3-4B"}, "transformer": {}}
    assert recorded_config.hf_model(write(tmp_path, nested)) == "Qwen/Qwen3-4B"
    assert recorded_config.hf_model(write(tmp_path, {"num_layers": 2})) is None


@pytest.mark.parametrize("text", ["", "model: [", "train: {}", "model: 7", "- model", "model: !!python/object:os.x {}"])
def test_a_damaged_one_is_named_in_one_line(text, arch, tmp_path):
    (tmp_path / recorded_config.NAME).write_text(text)
    with pytest.raises(UserError, match=r"run_config.yaml is damaged or not Megatron-Bridge's \(.*\); copy it") as it:
        recorded_config.check(tmp_path, arch("qwen3"))
    assert "\n" not in str(it.value)
