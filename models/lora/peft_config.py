"""adapter_config.json as PEFT writes it: rank and scale of an adapter, and the variants of LoRA that it may ask for."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoloss.models.weights.manifest import read_json
from isoloss.parallel.runtime.errors import UserError

CONFIG = "adapter_config.json"
# They change neither names nor numbers of what is saved: how PEFT begins, what it looks for, who wrote it.
WITHOUT_EFFECT = {
    "arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_modules", "target_parameters", "task_type",
}  # fmt: skip
READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"}
WHAT = {
    "use_dora": "DoRA, which scales each row of the adapted matrix",
    "use_qalora": "QA-LoRA, whose A sees means of groups of inputs",
    "lora_bias": "biases of the factors B",
    "modules_to_save": "copies of whole modules, trained beside the adapter",
    "trainable_token_indices": "rows of the embedding, trained beside the adapter",
    "alora_invocation_tokens": "an adapter that works only behind certain tokens",
    "layer_replication": "layers that occur several times",
    "fan_in_fan_out": "matrices stored as [in, out]",
}
# These leave factors that add to the base as it is. Others, such as pissa, change the base first.
INITS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class PeftConfig:
    """An adapter_config.json of plain LoRA.

    path: the file.
    base: name of the model that PEFT trained it on, if it says one.
    dropout: dropout of its training by PEFT. It has no effect any more.
    targets: names of the modules that it adapts, where the file lists them and no layer or module is left out; else ().
    """

    path: Path
    rank: int
    alpha: float
    root: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    base: str | None
    dropout: float
    targets: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's adapter, by the module's full name in the model."""
        return self.ranks.get(_key(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of the product of a module's adapter."""
        rank = self.rank_of(module)
        alpha = self.alphas.get(_key(self.alphas, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.root else rank)


def read_config(folder: Path) -> PeftConfig:
    """Read and check adapter_config.json. Raises UserError, naming the field, for what is not plain LoRA."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give one that PEFT or isoloss wrote an adapter to")
    fields = read_json(path, f"give a folder with {CONFIG}, as PEFT writes it; of a run, RUN/adapter")
    _check_variant(path, fields)
    try:
        ranks = {str(name): _positive(rank, int) for name, rank in (fields.get("rank_pattern") or {}).items()}
        alphas = {str(name): _positive(alpha, float) for name, alpha in (fields.get("alpha_pattern") or {}).items()}
        for pattern in (*ranks, *alphas):
            re.compile(pattern)
        rank, alpha = _positive(fields.get("r", 8), int), _positive(fields.get("lora_alpha", 8), float)
        dropout, base = float(fields.get("lora_dropout") or 0.0), fields.get("base_model_name_or_path")
        listed = fields.get("target_modules")
        partly = fields.get("layers_to_transform") is not None or bool(fields.get("exclude_modules"))
        targets = tuple(map(str, listed)) if isinstance(listed, list) and not partly else ()
    except (AttributeError, TypeError, ValueError, re.error) as error:
        raise UserError(f"{path} is no configuration of PEFT's LoRA ({error}); export the adapter again") from None
    root = fields.get("use_rslora") is True
    return PeftConfig(path, rank, alpha, root, ranks, alphas, str(base) if base else None, dropout, targets)


def _check_variant(path: Path, fields: Mapping[str, Any]) -> None:
    if (kind := fields.get("peft_type")) != "LORA":
        raise UserError(f"{path}: peft_type={kind!r} is not LORA, the only kind of adapter that isoloss reads")
    if (bias := fields.get("bias", "none")) != "none":
        raise UserError(f"{path}: bias={bias!r}: the model's biases were trained beside the adapter, and are not read")
    if (init := fields.get("init_lora_weights")) not in INITS:
        raise UserError(
            f"{path}: init_lora_weights={init!r} changes the model that the adapter is for: save the adapter with "
            "path_initial_model_for_weight_conversion, or merge it with PEFT"
        )
    for name, value in fields.items():
        if value and name not in WITHOUT_EFFECT | READ:
            what = WHAT.get(name, "something that isoloss does not know")
            raise UserError(f"{path}: {name}={value!r} means {what}: merge the adapter with PEFT instead")


def _key(patterns: Mapping[str, Any], module: str) -> str:
    """Return the first pattern that PEFT matches with a module's name."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)


def _positive(value: Any, kind: type) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf or kind(value) != value:
        raise ValueError(f"{value!r} where a {'whole ' if kind is int else ''}number above 0 should stand")
    return kind(value)
