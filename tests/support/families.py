"""Tiny models of every family, of sizes that tell dimensions apart, with every weight random."""

import copy
from pathlib import Path

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
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 307  # prime: every TP degree pads it
SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
DEEPSEEK = {"hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 4, "num_key_value_heads": 4,
            "moe_intermediate_size": 28, "n_routed_experts": 8, "num_experts_per_tok": 3, "kv_lora_rank": 20,
            "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14, "num_nextn_predict_layers": 0}  # fmt: skip
DENSE: dict[str, PreTrainedConfig] = {
    # Wavelengths below 10.7, between, and above 21.3 all occur among the 8 frequencies of a head of 16.
    "llama": LlamaConfig(**SIZES, hidden_size=64, intermediate_size=88, num_attention_heads=4, num_key_value_heads=2,
                         rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False),
    "mistral": MistralConfig(**SIZES, hidden_size=48, intermediate_size=80, num_attention_heads=6,
                             num_key_value_heads=2, head_dim=12, sliding_window=11, rope_parameters=PLAIN_ROPE),
    "qwen2": Qwen2Config(**SIZES, hidden_size=48, intermediate_size=72, num_attention_heads=6, num_key_value_heads=2,
                         rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True),
    "qwen2-yarn": Qwen2Config(**SIZES, hidden_size=48, intermediate_size=72, num_attention_heads=6,
                              num_key_value_heads=2, rope_parameters=YARN_ROPE, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, hidden_size=48, intermediate_size=80, num_attention_heads=4, num_key_value_heads=2,
                         head_dim=20, rope_parameters=PLAIN_ROPE, tie_word_embeddings=False),
}  # fmt: skip
SPARSE: dict[str, PreTrainedConfig] = {
    "qwen3-moe": Qwen3MoeConfig(**SIZES, hidden_size=48, intermediate_size=72, num_attention_heads=4,
                                num_key_value_heads=2, head_dim=16, moe_intermediate_size=28, num_experts=6,
                                num_experts_per_tok=3, norm_topk_prob=True, rope_parameters=PLAIN_ROPE),
    "qwen3-moe-unnormalized": Qwen3MoeConfig(
        **SIZES, hidden_size=48, intermediate_size=72, num_attention_heads=4, num_key_value_heads=2, head_dim=20,
        moe_intermediate_size=28, num_experts=6, num_experts_per_tok=3, norm_topk_prob=False,
        rope_parameters=PLAIN_ROPE, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES, hidden_size=48, intermediate_size=40, num_attention_heads=6,
                             num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=9,
                             rope_parameters=PLAIN_ROPE),
    "deepseek-v3": DeepseekV3Config(**SIZES, **DEEPSEEK, n_group=4, topk_group=2, n_shared_experts=2,
                                    first_k_dense_replace=1, q_lora_rank=26, routed_scaling_factor=1.5,
                                    rope_parameters={**YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 1.2}),
    "deepseek-v3-plain": DeepseekV3Config(**SIZES, **DEEPSEEK, n_group=1, topk_group=1, n_shared_experts=1,
                                          first_k_dense_replace=0, q_lora_rank=None, norm_topk_prob=False,
                                          rope_parameters=PLAIN_ROPE),
    "glm-4.5": Glm4MoeConfig(**SIZES, hidden_size=48, intermediate_size=72, num_attention_heads=4,
                             num_key_value_heads=2, head_dim=16, moe_intermediate_size=28, n_routed_experts=8,
                             num_experts_per_tok=3, n_shared_experts=1, first_k_dense_replace=1, attention_bias=True,
                             use_qk_norm=True, routed_scaling_factor=2.0, num_nextn_predict_layers=0,
                             rope_parameters={**PLAIN_ROPE, "partial_rotary_factor": 0.5}),
    "gpt-oss": GptOssConfig(**SIZES, hidden_size=48, intermediate_size=40, num_attention_heads=6,
                            num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                            sliding_window=9, rope_parameters={**YARN_ROPE, "truncate": False}),
}  # fmt: skip
CONFIGS = DENSE | SPARSE


def write_folder(name: str, path: Path, **changes: int) -> Path:
    """A Hugging Face folder with every weight random: matrices, norms, biases, sinks. changes: of its config.json."""
    torch.manual_seed(1)
    config = copy.deepcopy(CONFIGS[name])
    for field, value in changes.items():
        setattr(config, field, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(0.0, 0.1)  # of the size of the scores' differences
            elif name.endswith(("bias", "sinks")):
                tensor.normal_(0.0, 0.5)
            elif tensor.ndim == 1:
                tensor.normal_(1.0, 0.3)
            else:  # large enough that attention is far from uniform
                tensor.normal_(0.0, 1.5 * tensor.shape[-1] ** -0.5)
    model.save_pretrained(path)
    return path
