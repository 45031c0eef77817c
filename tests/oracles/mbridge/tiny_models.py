"""Tiny Hugging Face models for comparing weight maps: config.json as on the hub, weights a function of their names.

Sizes are unequal on purpose, so that a transposed or misplaced tensor cannot fit: hidden size, width of all query
heads, width of all key heads, MLP width and vocabulary all differ. The exception is Qwen2, whose published config.json
has no head_dim, so that its query heads are together as wide as its hidden size. Every family has 2 key/value heads,
and TP 2 divides what it must. Vocabularies are primes: both maps pad them with zero rows to a multiple of 128, mbridge
by its argument `make_vocab_size_divisible_by` (without it TP has to divide the vocabulary).

Needs nothing but numpy, torch and safetensors.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

SEED = 0

# Everywhere the same; the sizes follow.
_COMMON = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02,
    "max_position_embeddings": 64, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "torch_dtype": "float32", "transformers_version": "4.51.0", "use_cache": True,
}  # fmt: skip
_QWEN = {"sliding_window": None, "use_sliding_window": False}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None,
        "num_hidden_layers": 2, "hidden_size": 40, "num_attention_heads": 4, "head_dim": 12,
        "intermediate_size": 28, "vocab_size": 131, "tie_word_embeddings": False,
    },
    "qwen2": {
        **_COMMON, **_QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_window_layers": 3,
        "num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6,
        "intermediate_size": 44, "vocab_size": 149, "tie_word_embeddings": True,
    },
    "qwen3": {
        **_COMMON, **_QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_window_layers": 3,
        "attention_bias": False, "rope_scaling": None,
        "num_hidden_layers": 3, "hidden_size": 36, "num_attention_heads": 6, "head_dim": 10,
        "intermediate_size": 52, "vocab_size": 137, "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        **_COMMON, **_QWEN, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "max_window_layers": 2,
        "attention_bias": False, "rope_scaling": None,
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 14,
        "intermediate_size": 68, "vocab_size": 151, "tie_word_embeddings": False,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 20, "norm_topk_prob": True,
        "num_experts": 6, "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    },
}  # fmt: skip


def shapes(family: str) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes as stored on disk; experts one by one."""
    config = CONFIGS[family]
    hidden, table = config["hidden_size"], (config["vocab_size"], config["hidden_size"])
    named = {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        named["lm_head.weight"] = table
    for layer in range(config["num_hidden_layers"]):
        for name, shape in (*_attention(config), *_mlp(config)):
            named[f"model.layers.{layer}.{name}"] = shape
    return named


def tensors(family: str) -> dict[str, torch.Tensor]:
    """Every tensor of the model, fp32; norms and biases are as random as the rest."""
    return {name: _random(name, shape) for name, shape in shapes(family).items()}


def write(family: str, folder: str | Path) -> None:
    """The model as a folder in the Hugging Face format."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[family], indent=2) + "\n", encoding="utf-8")
    save_file(tensors(family), folder / "model.safetensors", metadata={"format": "pt"})


def sha256(tensor: torch.Tensor) -> str:
    """Of the tensor's values as contiguous little-endian fp32."""
    return hashlib.sha256(tensor.detach().numpy().astype("<f4", order="C").tobytes()).hexdigest()


def _attention(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config["hidden_size"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // num_heads)
    yield "input_layernorm.weight", (hidden,)
    for part, heads in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
        yield f"self_attn.{part}_proj.weight", (heads * head_dim, hidden)
        if config["model_type"] == "qwen2":
            yield f"self_attn.{part}_proj.bias", (heads * head_dim,)
    if config["model_type"] in ("qwen3", "qwen3_moe"):
        yield "self_attn.q_norm.weight", (head_dim,)
        yield "self_attn.k_norm.weight", (head_dim,)
    yield "self_attn.o_proj.weight", (hidden, num_heads * head_dim)


def _mlp(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, num_experts = config["hidden_size"], config.get("num_experts")
    yield "post_attention_layernorm.weight", (hidden,)
    if num_experts is None:
        blocks, wide = ["mlp"], config["intermediate_size"]
    else:
        blocks, wide = [f"mlp.experts.{expert}" for expert in range(num_experts)], config["moe_intermediate_size"]
        yield "mlp.gate.weight", (num_experts, hidden)
    for block in blocks:
        yield f"{block}.gate_proj.weight", (wide, hidden)
        yield f"{block}.up_proj.weight", (wide, hidden)
        yield f"{block}.down_proj.weight", (hidden, wide)


def _random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Uniform in [-1, 1), exact multiples of 2^-23: integer arithmetic alone, the same on every machine."""
    seed = int.from_bytes(hashlib.sha256(f"{SEED}:{name}".encode()).digest()[:16], "little")
    integers = np.random.Generator(np.random.PCG64(seed)).integers(-(2**23), 2**23, size=shape)
    return torch.from_numpy((integers / 2**23).astype(np.float32))
