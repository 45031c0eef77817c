"""The models of the covering array: tiny ones, one for each kind of layer that has code of its own."""

from functools import cache
from pathlib import Path
from typing import Any

from isoloss.engine.config.schema import MoeConfig
from isoloss.models.architecture import Architecture
from isoloss.models.families.registry import family_of
from isoloss.parallel import Layout
from support.models.families import GATED_DELTA, published, write_config, write_folder
from support.ranks.invariance import QWEN3, WIDE

# Coefficients that give the losses of the routers a weight like that of the cross-entropy.
ROUTER_LOSSES = MoeConfig("sequence", 0.5, 0.1)
# Of each kind what differs from families' model of that name, and how its experts are balanced.
KINDS = {
    "qwen3": (QWEN3, MoeConfig()),
    "qwen2": (WIDE | {"num_key_value_heads": 2}, MoeConfig()),  # tied embeddings, biases, few key/value heads
    "qwen3.5": (GATED_DELTA | QWEN3 | {"full_attention_interval": 2, "head_dim": 20}, MoeConfig()),  # Gated DeltaNet
    "gemma-4": ({"num_key_value_heads": 8, "num_global_key_value_heads": 4}, MoeConfig()),
    "qwen3-moe": (QWEN3 | {"num_experts": 8}, ROUTER_LOSSES),
    "gpt-oss": ({"num_attention_heads": 8, "num_key_value_heads": 4}, ROUTER_LOSSES),  # windows, sinks, biases
    "deepseek-v3": (  # latent attention, a dense layer, shared experts, selection biases
        {"num_attention_heads": 8, "num_key_value_heads": 8},
        MoeConfig("sequence", 0.3, bias_update_rate=0.003),
    ),
    "minimax-m2": (QWEN3 | {"intermediate_size": 28, "head_dim": 8, "rotary_dim": 4}, MoeConfig(z_loss_coef=0.1)),
}


def depth(layout: Layout) -> int:
    """Layers of a model there: two, one of each kind where a model has two kinds of them; and one a stage."""
    return max(2, layout.pp * layout.vpp)


def sizes(kind: str, layers: int) -> dict[str, Any]:
    found = KINDS[kind][0] | {"num_hidden_layers": layers}
    if kind == "gemma-4":
        found["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    return found


@cache
def architecture(kind: str, layers: int) -> Architecture:
    config = published(kind, **sizes(kind, layers))
    return family_of(config["architectures"][0]).architecture(config)


def write_model(kind: str, layers: int, path: Path) -> Path:
    """A Hugging Face folder. Gemma's weights are of a file and random: made up its norms and the scalars of its layers
    would be 1, which nobody could tell from left out."""
    if kind == "gemma-4":
        return write_folder(kind, path, **sizes(kind, layers))
    return write_config(path, published(kind, **sizes(kind, layers)))
