"""The factors in a checkpoint of an adapter, read without a model and a process group."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from isoloss.models.families.registry import read_architecture
from isoloss.models.kinds.weight import Weight
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import factors_of, linears
from isoloss.models.lora.peft_source import targets_of
from isoloss.models.weights import manifest
from isoloss.models.weights.checkpoint_dirs import checkpoint_folder
from isoloss.models.weights.distcp import Folder
from isoloss.models.weights.finite import check_finite
from isoloss.parallel.runtime.errors import UserError


class CheckpointFactors:
    """A source of the factors in a checkpoint of an adapter, in the type of its training.

    folder: the checkpoint; of a run, its newest one.
    lora: keys under which the adapter was trained.

    Raises UserError where the checkpoint holds a whole model or is damaged.
    """

    def __init__(self, path: Path, hf: Path | None = None):
        """hf: folder of the model that it was trained on; None: the names of its tensors follow from config.json."""
        path = self.folder = checkpoint_folder(path)
        written = manifest.read(path)
        if written.adapter is None:
            raise UserError(f"{path} holds a whole model and no adapter: mcore-to-hf converts it")
        manifest.check_checksums(path, written)
        self._named_by = hf or path
        self.arch = read_architecture(self._named_by)
        self._stored = Folder(path)
        self.lora = self._keys(written.adapter)

    def whole(self, weight: Weight) -> Tensor:
        stored = self._stored.tensors[weight.name]
        numbers = self._stored.rows(stored, (), 0, weight.shape)
        check_finite(numbers, weight.name, self.folder)
        return numbers

    def _keys(self, record: Mapping[str, Any]) -> LoraConfig:
        """Return the keys, with targets that mean the factors that are there."""
        try:
            named = {name: record[name] for name in ("rank", "alpha", "scaling", "expert_rank")}
            lora = LoraConfig(**named)
            adapted = [weight for weight, _ in linears(self.arch) if self._has(weight, lora)]
            targets = targets_of(self.arch, adapted)
            if targets is None:
                raise ValueError("no lora.targets mean its factors")
            return replace(lora, targets=targets)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.folder} holds an adapter that does not fit the model of {self._named_by} ({error}): name the "
                "folder of the model that it was trained on by --hf"
            ) from None

    def _has(self, weight: Weight, lora: LoraConfig) -> bool:
        factors = factors_of(weight, lora)
        found = [self._stored.tensors.get(factor.name) for factor in (factors.a, factors.b)]
        if found == [None, None]:
            return False
        for factor, stored in zip((factors.a, factors.b), found, strict=True):
            if stored is None or stored.shape != factor.shape:
                raise ValueError(f"{factor.name} has shape {stored and list(stored.shape)}, not {list(factor.shape)}")
        return True
