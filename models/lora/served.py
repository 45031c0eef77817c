"""What SGLang serves of an adapter: families, matrices and the names that it has for them.

It reads neither rank_pattern nor alpha_pattern, skips tensors whose names it does not know, and answers by the model
alone where it skipped them all. So what it does not read is refused before a run begins.
"""

from collections.abc import Sequence
from typing import Any

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.kind import Refusal
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import adapter_map, leaves
from isoloss.models.lora.peft_folder import config_of

# Families whose log-probabilities under an adapter were compared with the engine's (tests/sglang/test_adapters.py).
FAMILIES = ("glm4_moe", "llama", "ministral3", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
# Its names of matrices that a family's files call otherwise.
NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def refusals(arch: Architecture, lora: LoraConfig) -> Sequence[Refusal]:
    """Return why SGLang would not serve the adapter, first the causes."""
    found: list[Refusal] = []
    if arch.family not in FAMILIES:
        why = f"trains an adapter of {arch.family}, which was not compared with SGLang's (rollout.backend=sglang)"
        found.append(("lora.rank", why, "use rollout.backend=megatron, or lora.rank=0"))
        return found
    if lora.rank_of(expert=True) != lora.rank:
        why = f"is a rank of its own, and SGLang takes that of every matrix for lora.rank={lora.rank}"
        found.append(("lora.expert_rank", why, "leave it at null, or use rollout.backend=megatron"))
    names = target_names(arch, lora)
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        served = [name for name in names if name in TARGETS]
        why = f"adapts {', '.join(unknown)}, which SGLang has no adapters for"
        found.append(("lora.targets", why, f"set lora.targets=[{','.join(served)}], or use rollout.backend=megatron"))
    return found


def target_names(arch: Architecture, lora: LoraConfig) -> list[str]:
    """Return SGLang's names of the adapted matrices."""
    found = {leaf for factors in adapter_map(arch, lora) for leaf in leaves(factors.base)}
    return sorted({NAMES.get(leaf, leaf) for leaf in found})


def served_config(arch: Architecture, lora: LoraConfig, base: str) -> dict[str, Any]:
    """Return adapter_config.json for SGLang. base: folder of the model."""
    return {**config_of(arch, lora, base), "target_modules": target_names(arch, lora), "target_parameters": None}


def served_shapes(arch: Architecture, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors by PEFT's names."""
    weights = [weight for factors in adapter_map(arch, lora) for weight in (factors.a, factors.b)]
    return {f"base_model.model.{part.tensor}": part.shape for weight in weights for part in weight.parts}
