"""Refuse what SGLang does not serve of an adapter.

It reads neither rank_pattern nor alpha_pattern, skips tensors whose names it does not know, and answers by the model
alone where it skipped them all. So what was not seen to be served is refused before a run begins.
"""

from collections.abc import Iterator
from typing import Any

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.kind import Refusal
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import adapter_map, factor_weights, leaves
from isoloss.models.lora.peft_folder import config_of

# Families whose log-probabilities under an adapter were compared with the engine's (tests/sglang/test_adapters.py).
FAMILIES = ("glm4_moe", "llama", "ministral3", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


def refusals(arch: Architecture, lora: LoraConfig) -> Iterator[Refusal]:
    """Yield why SGLang would not serve the adapter."""
    if arch.family not in FAMILIES:
        why = f"trains an adapter of {arch.family}, which was not compared with what SGLang makes of it"
        yield "lora.rank", why, "use rollout.backend=megatron, or lora.rank=0"
    elif any(factors.of_output for factors in adapter_map(arch, lora)):
        why = "names lm_head, whose adapter was not compared with what SGLang makes of it (rollout.backend=sglang)"
        yield "lora.targets", why, "leave lm_head out, or use rollout.backend=megatron"
    elif any(factors.base.expert is not None for factors in adapter_map(arch, lora)):
        why = "adapts experts, which were not compared with what SGLang makes of them (rollout.backend=sglang)"
        yield "lora.targets", why, "set lora.targets=[attention], or use rollout.backend=megatron"


def target_names(arch: Architecture, lora: LoraConfig) -> list[str]:
    """Return the names of the adapted matrices, without those of the modules around them."""
    return sorted({leaf for factors in adapter_map(arch, lora) for leaf in leaves(factors.base)})


def served_config(arch: Architecture, lora: LoraConfig, base: str) -> dict[str, Any]:
    """Return adapter_config.json for SGLang. base: folder of the model."""
    return {**config_of(arch, lora, base), "target_modules": target_names(arch, lora)}


def served_shapes(arch: Architecture, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors by PEFT's names."""
    parts = [part for weight in factor_weights(arch, lora) for part in weight.parts]
    return {f"base_model.model.{part.tensor}": part.shape for part in parts}
