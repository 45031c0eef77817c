"""The presets for clusters are legal for the models they are made for, on the nodes that they name."""

import json

import pytest

from isoloss.engine import legality
from isoloss.engine.config import Config
from isoloss.models.registry import read_architecture
from isoloss.recipes.launch import compose_config

COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 131072, "head_dim": 128}
LLAMA = COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256}
QWEN3 = COMMON | {"vocab_size": 151936, "tie_word_embeddings": False}
LLAMA_8B = LLAMA | {
    "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64
}  # fmt: skip
QWEN3_32B = QWEN3 | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 64, "hidden_size": 5120,
    "intermediate_size": 25600, "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
QWEN3_30B_A3B = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048,
    "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip
MADE_FOR = {
    "8b_h100": (LLAMA_8B, 8),
    "8b_128k_h100": (LLAMA_8B, 16),
    "32b_h100": (QWEN3_32B, 16),
    "70b_h100": (LLAMA_70B, 32),
    "30b_a3b_h100": (QWEN3_30B_A3B, 16),
}


@pytest.mark.parametrize("preset", MADE_FOR)
def test_a_preset_is_legal(preset, tmp_path):
    model, gpus = MADE_FOR[preset]
    (tmp_path / "config.json").write_text(json.dumps(model))
    config, _, _ = compose_config(
        "sft", Config, [f"preset={preset}", f"model.path={tmp_path}", "data.train=[rows.jsonl]"]
    )
    layout = config.parallel.layout().with_world(gpus)
    legality.check(config, read_architecture(tmp_path), layout)
    assert layout.world_size == gpus
