"""Every tiny model of the tests: one table, of sizes that tell dimensions apart, with every weight random.

Tests that need other sizes name the changes; keywords go to the configuration's class, as from a config.json.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    Ministral3Config,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

# Among the classes that transformers chooses by a configuration, 5.23 has it for multimodal models only.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

VOCAB = 307  # prime: every TP degree pads it
SIZES = {
    "vocab_size": VOCAB, "num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 72, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SCALED_QUERIES = {**YARN_ROPE, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
QWEN3_MOE = {"moe_intermediate_size": 28, "num_experts": 6, "num_experts_per_tok": 3, "rope_parameters": PLAIN_ROPE}
# A selection bias, shared experts, and none for multi-token prediction.
GROUPED = {"moe_intermediate_size": 28, "n_routed_experts": 8, "num_experts_per_tok": 3, "num_nextn_predict_layers": 0}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14}
# Value heads are twice the key heads; no two sizes are equal.
GATED_DELTA = {
    "head_dim": 20, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 14,
    "linear_value_head_dim": 10, "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.4},
}  # fmt: skip
Row = tuple[type[PreTrainedConfig], dict[str, Any]]
DENSE: dict[str, Row] = {
    # Wavelengths below 10.7, between, and above 21.3 all occur among the 8 frequencies of a head of 16.
    "llama": (LlamaConfig, {"hidden_size": 56, "intermediate_size": 88, "head_dim": 16,
                            "rope_parameters": LLAMA3_ROPE}),
    "mistral": (MistralConfig, {"intermediate_size": 80, "num_attention_heads": 6, "head_dim": 12,
                                "sliding_window": 11, "rope_parameters": PLAIN_ROPE}),
    "ministral-3": (Ministral3Config, {"intermediate_size": 88, "num_attention_heads": 6, "head_dim": 16,
                                       "rope_parameters": {**SCALED_QUERIES, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "qwen2": (Qwen2Config, {"num_attention_heads": 6, "rope_parameters": PLAIN_ROPE | {"rope_theta": 1e6},
                            "tie_word_embeddings": True}),
    "qwen2-yarn": (Qwen2Config, {"num_attention_heads": 6, "rope_parameters": YARN_ROPE}),
    "qwen3.5": (Qwen3_5TextConfig, {**GATED_DELTA, "full_attention_interval": 2}),
    # A layer with a window; one without, whose heads are wider and fewer, and whose values are its keys.
    "gemma-4": (Gemma4TextConfig, {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 12, "sliding_window": 9,
        "num_global_key_value_heads": 2, "global_head_dim": 20, "attention_k_eq_v": True, "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 0, "pad_token_id": None, "final_logit_softcapping": 3.0, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.4, "rope_theta": 1e4},
        },
    }),
    "qwen3": (Qwen3Config, {"intermediate_size": 80, "head_dim": 20, "rope_parameters": PLAIN_ROPE}),
}  # fmt: skip
SPARSE: dict[str, Row] = {
    "qwen3-moe": (Qwen3MoeConfig, {**QWEN3_MOE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-unnormalized": (Qwen3MoeConfig, {**QWEN3_MOE, "head_dim": 20, "norm_topk_prob": False,
                                                "tie_word_embeddings": True}),
    "mixtral": (MixtralConfig, {"intermediate_size": 40, "num_attention_heads": 6, "num_local_experts": 4,
                                "num_experts_per_tok": 2, "sliding_window": 9, "rope_parameters": PLAIN_ROPE}),
    "deepseek-v3": (DeepseekV3Config, {
        **GROUPED, **LATENT, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "q_lora_rank": 26, "routed_scaling_factor": 1.5,
        "rope_parameters": {**YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 1.2},
    }),
    "deepseek-v3-plain": (DeepseekV3Config, {
        **GROUPED, **LATENT, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0,
        "q_lora_rank": None, "norm_topk_prob": False, "rope_parameters": PLAIN_ROPE,
    }),
    "mistral-4": (Mistral4Config, {
        **GROUPED, **LATENT, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 22, "v_head_dim": 16, "routed_scaling_factor": 1.3,
        "rope_parameters": {**SCALED_QUERIES, "mscale": 0.8, "mscale_all_dim": 1.2},
    }),
    "glm-4.5": (Glm4MoeConfig, {
        **GROUPED, "head_dim": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True,
        "use_qk_norm": True, "routed_scaling_factor": 2.0,
        "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5},
    }),
    "glm-4.7-flash": (Glm4MoeLiteConfig, {
        **GROUPED, **LATENT, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "q_lora_rank": 22,
        "routed_scaling_factor": 1.8, "v_head_dim": 16, "rope_parameters": PLAIN_ROPE,
    }),
    "qwen3.5-moe": (Qwen3_5MoeTextConfig, {
        **GATED_DELTA, "full_attention_interval": 2, "moe_intermediate_size": 28, "num_experts": 6,
        "num_experts_per_tok": 3, "shared_expert_intermediate_size": 36,
    }),
    "qwen3-next": (Qwen3NextConfig, {
        **GATED_DELTA, "full_attention_interval": 2, "moe_intermediate_size": 28, "num_experts": 6,
        "num_experts_per_tok": 3, "shared_expert_intermediate_size": 36, "tie_word_embeddings": True,
    }),
    "gpt-oss": (GptOssConfig, {"intermediate_size": 40, "num_attention_heads": 6, "head_dim": 16,
                               "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9,
                               "rope_parameters": {**YARN_ROPE, "truncate": False}}),
    "minimax-m2": (MiniMaxM2Config, {"intermediate_size": 40, "num_attention_heads": 6, "head_dim": 20,
                                     "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 12,
                                     "rope_parameters": PLAIN_ROPE}),
    # A dense layer that sees everything; one with a window, twice the key/value heads, sinks and experts.
    "mimo-v2-flash": (MiMoV2FlashConfig, {
        "num_attention_heads": 8, "head_dim": 20, "v_head_dim": 14, "attention_value_scale": 0.6, "sliding_window": 9,
        "moe_intermediate_size": 28, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1,
        "routed_scaling_factor": 1.4, "rope_parameters": {
            kind: {**PLAIN_ROPE, "rope_theta": theta, "partial_rotary_factor": 0.6}
            for kind, theta in (("full_attention", 5e6), ("sliding_attention", 100.0))
        },
    }),
}  # fmt: skip
SPARSE["gemma-4-moe"] = (Gemma4TextConfig, DENSE["gemma-4"][1] | {
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 28,
})  # fmt: skip
MODELS = DENSE | SPARSE
# One row of each architecture: without those that say of one what another row does not.
FAMILIES = tuple(name for name in MODELS if name not in ("qwen2-yarn", "qwen3-moe-unnormalized", "deepseek-v3-plain"))


def config(name: str, **changes: Any) -> PreTrainedConfig:
    config_class, fields = MODELS[name]
    return config_class(**copy.deepcopy(SIZES | fields | changes))


def published(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of such a model, as transformers writes it."""
    found = config(name, **changes)
    found.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(found)].__name__]
    return json.loads(found.to_json_string())


def make(
    name: str, *, dtype: torch.dtype = torch.float32, seed: int = 1, gain: float = 1.5, **changes: Any
) -> PreTrainedModel:
    """Every weight random, so that no two can be exchanged ignore: matrices, norms, biases, sinks.

    gain: of a matrix, from its input's size to its output's. 1.5 makes attention far from uniform.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(name, **changes), attn_implementation="eager")
    return fill(model, gain).to(dtype)


def fill(model: PreTrainedModel, gain: float = 1.5) -> PreTrainedModel:
    """Random numbers in every weight of a model."""
    text = model.config.get_text_config()
    with torch.no_grad():
        for tensor_name, tensor in model.state_dict().items():
            if tensor_name.endswith("e_score_correction_bias"):
                tensor.normal_(0.0, 0.1)  # of the size of the scores' differences
            elif tensor_name.endswith(("bias", "sinks")):
                tensor.normal_(0.0, 0.5)
            elif tensor_name.endswith("A_log"):
                tensor.copy_(torch.logspace(-2.3, 1.2, len(tensor)).log())  # from slow decays, in which leaks show
            elif tensor.ndim == 1:
                zero_centered = hasattr(text, "linear_num_key_heads") and "linear_attn" not in tensor_name
                tensor.normal_(0.0 if zero_centered else 1.0, 0.3)
            else:
                # A delta rule solves a system of its keys, which must not be close to singular.
                tensor.normal_(0.0, (1.0 if "linear_attn" in tensor_name else gain) * tensor.shape[-1] ** -0.5)
    return model


def write_folder(name: str, path: Path, *, max_shard_size: str = "50GB", **options: Any) -> Path:
    """The Hugging Face folder of such a model (options: those of `make`), in one file unless max_shard_size makes it
    several."""
    make(name, **options).save_pretrained(path, max_shard_size=max_shard_size)
    return path


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face folder, as safetensors reads it."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def write_config(path: Path, config_json: dict[str, Any]) -> Path:
    """A folder with config.json alone, for models from scratch."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config_json))
    return path
