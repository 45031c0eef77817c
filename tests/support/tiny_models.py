"""Hugging Face folders of tiny random models, one of every family, with sizes that differ wherever they can."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SIZES = {
    "vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 72, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
GROUPED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
    "moe_intermediate_size": 20, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
CONFIGS: Mapping[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "LlamaForCausalLM": (LlamaConfig, {"head_dim": 16, "rope_parameters": LLAMA3_ROPE}),
    "MistralForCausalLM": (MistralConfig, {"head_dim": 20, "sliding_window": 9, "rope_parameters": DEFAULT_ROPE}),
    "Qwen2ForCausalLM": (Qwen2Config, {"rope_parameters": DEFAULT_ROPE}),
    "Qwen3ForCausalLM": (Qwen3Config, {"head_dim": 20, "rope_parameters": DEFAULT_ROPE}),
    "Qwen3MoeForCausalLM": (Qwen3MoeConfig, {
        "head_dim": 20, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "norm_topk_prob": True,
        "rope_parameters": DEFAULT_ROPE,
    }),
    "MixtralForCausalLM": (MixtralConfig, {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
        "rope_parameters": DEFAULT_ROPE,
    }),
    "DeepseekV3ForCausalLM": (DeepseekV3Config, {
        **GROUPED, "num_key_value_heads": 4, "q_lora_rank": 28, "kv_lora_rank": 36, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 16,
        "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 32, "beta_slow": 1},
    }),
    "Glm4MoeForCausalLM": (Glm4MoeConfig, {
        **GROUPED, "head_dim": 16, "use_qk_norm": True, "attention_bias": True,
        "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5},
    }),
    "GptOssForCausalLM": (GptOssConfig, {
        "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {**YARN_ROPE, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    }),
}  # fmt: skip


def make(architecture: str, dtype: torch.dtype = torch.float32, seed: int = 1, **changes: Any) -> PreTrainedModel:
    """Every weight random, so that no two can be exchanged unnoticed: matrices, norms, biases, sinks."""
    config_class, fields = CONFIGS[architecture]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_class(**{**SIZES, **fields, **changes}), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("bias", "sinks")):
                tensor.normal_(0.0, 0.2)
            elif "inv_freq" in name:
                pass
            elif tensor.ndim == 1:
                tensor.normal_(1.0, 0.3)
            else:
                tensor.normal_(0.0, tensor.shape[-1] ** -0.5)
    return model.to(dtype)


def write(path: Path, architecture: str, *, max_shard_size: str = "50GB", **options: Any) -> Path:
    """The folder of such a model, in one file unless `max_shard_size` makes it several."""
    make(architecture, **options).save_pretrained(path, max_shard_size=max_shard_size)
    return path
