"""The folder of an adapter as PEFT writes it: adapter_config.json and adapter_model.safetensors.

PEFT joins adapters of experts as transformers joins their weights in memory: those of gate and up have twice the rank
together. Where a file holds one tensor for all experts, the names are those of PEFT's ParamWrapper: A has the experts
one below the other, B has them innermost, and of two wrappers around a module that of gate_up_proj is the inner one,
`base_layer`.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.weight import Part
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import adapter_map
from isoloss.models.lora.peft_config import CONFIG
from isoloss.models.weights.hf_checkpoint import WeightSource
from isoloss.models.weights.manifest import sync
from isoloss.parallel.runtime.errors import UserError

TENSORS = "adapter_model.safetensors"
# Model types of which PEFT takes gate_proj, up_proj and down_proj for names of experts alone: adapters of dense MLPs
# and shared experts have to be named as parameters, or PEFT drops them in silence.
NAMES_OF_EXPERTS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next")
# Model types whose experts PEFT joins without looking for their adapters: their joined parameters have to be named.
JOINED = ("mimo_v2_flash", "qwen3_5_moe_text")
_KEY = re.compile(r"(?P<module>.*)\.lora_(?P<letter>[AB])\.weight")


def config_of(arch: Architecture, lora: LoraConfig, base: str | None) -> dict[str, Any]:
    """Return adapter_config.json. base: folder of the model, if it is known.

    The scale is written as alpha / r also for rsLoRA: SGLang reads neither use_rslora nor patterns.
    """
    parts = [(factors, part) for factors in adapter_map(arch, lora) for part in factors.a.parts]
    modules = {_module(part).rsplit(".", 1)[-1] for _, part in parts if part.row is None}
    parameters = {".".join(_module(part).rsplit(".", 3)[-3:]) for _, part in parts if part.row is not None}
    ranks, alphas = dict[str, int](), dict[str, float]()
    rank = lora.rank
    expert_rank = lora.rank_of(expert=True)
    experts = [part for factors, part in parts if factors.base.expert is not None]
    apart = any(part.row is None for part in experts)
    own_rank = bool(experts) and expert_rank != rank
    if apart and (own_rank or arch.family in JOINED):  # the first pattern that matches counts
        ranks[r".*\.experts\.gate_up_proj"] = 2 * expert_rank
        alphas[r".*\.experts\.gate_up_proj"] = 2 * lora.scale(expert_rank) * expert_rank
    if own_rank:
        ranks[r".*\.experts\..*"] = expert_rank
        alphas[r".*\.experts\..*"] = lora.scale(expert_rank) * expert_rank
    if arch.family in NAMES_OF_EXPERTS:
        for _, part in parts:
            module = _module(part)
            if re.search(r"\.(gate|up|down)_proj$", module) and ".experts." not in module:
                parameters.add(".".join(module.split(".")[-2:]) + ".weight")
    if apart and arch.family in JOINED:
        parameters |= {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
        "lora_alpha": lora.scale(rank) * rank, "target_modules": sorted(modules), "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True, "use_rslora": False, "use_dora": False, "rank_pattern": ranks,
        "alpha_pattern": alphas, "target_parameters": sorted(parameters) or None,
    }  # fmt: skip


def tensors_of(factors: Iterable[tuple[Part, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of adapter_model.safetensors. factors: every part of every factor, with its values."""
    found, of_experts = dict[str, Tensor](), dict[str, dict[int, Tensor]]()
    for part, tensor in factors:
        if part.row is None:
            found[f"base_model.model.{part.tensor}"] = tensor.contiguous()
        else:
            of_experts.setdefault(part.tensor, {})[part.row] = tensor
    for name, rows in of_experts.items():
        match = _KEY.fullmatch(name)
        assert match is not None
        module, parameter = match["module"].rsplit(".", 1)
        both = f"{module}.down_proj.lora_{match['letter']}.weight" in of_experts
        inner = "base_layer." if parameter == "gate_up_proj" and both else ""
        stacked = torch.stack([rows[row] for row in range(len(rows))])
        joined = stacked.flatten(0, 1) if match["letter"] == "A" else stacked.permute(1, 2, 0).flatten(1)
        found[f"base_model.model.{module}.{inner}lora_{match['letter']}.weight"] = joined.contiguous()
    return found


def write_adapter(
    folder: Path, arch: Architecture, lora: LoraConfig, source: WeightSource, base: str | None
) -> Mapping[str, Tensor]:
    """Write a folder from a source of factors, whole or not at all; return its tensors.

    arch: architecture by whose names `source` is asked; those of its text model are written.
    Raises UserError where the folder exists.
    """
    if folder.exists():
        raise UserError(f"{folder} exists already; choose another folder to write to, or delete it")
    parts = list[tuple[Part, Tensor]]()
    for asked, named in zip(adapter_map(arch, lora), adapter_map(arch.text_only(), lora), strict=True):
        for of, to in ((asked.a, named.a), (asked.b, named.b)):
            parts += zip(to.parts, of.mapping.split(source.whole(of)), strict=True)
    tensors = tensors_of(parts)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # Views of one matrix share its memory, which safetensors refuses.
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, partial / TENSORS, metadata={"format": "pt"})
    config = config_of(arch.text_only(), lora, base)
    (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in (*partial.iterdir(), partial):
        sync(path)
    partial.rename(folder)
    sync(folder.parent)
    return tensors


def _module(part: Part) -> str:
    match = _KEY.fullmatch(part.tensor)
    assert match is not None, part.tensor
    return match["module"]
