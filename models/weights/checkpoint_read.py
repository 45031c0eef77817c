"""The weights of a torch_dist checkpoint, written by isoloss or by plain Megatron-Core, at any layout.

Everything but the numbers is checked against the weight map as soon as a checkpoint is opened: each weight of the model
is there once, at its shape, and no tensor of a model is left over. The optimizer's state is passed over.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.mappings import Vocabulary
from isoloss.models.kinds.weight import Weight
from isoloss.models.weights import manifest, recorded_config
from isoloss.models.weights.checkpoint_names import (
    CheckpointRows,
    Style,
    checkpoint_rows,
)
from isoloss.models.weights.distcp import Folder, StoredTensor
from isoloss.models.weights.finite import check_finite
from isoloss.models.weights.weight_map import weight_map
from isoloss.parallel.runtime.errors import UserError

EMBEDDING = "embedding.word_embeddings.weight"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")


@dataclass(frozen=True)
class StoredRows:
    """Rows (start, stop) of a weight: they are stored[index], or its first ones where the vocabulary is padded."""

    stored: StoredTensor
    index: tuple[int, ...]
    rows: tuple[int, int]


class CheckpointWeights:
    """A source of weights. Raises UserError where the checkpoint is not one of this architecture, or is damaged.

    style: naming of the keys.
    keys: keys of the model's tensors.
    skipped: keys of tensors that the model does not use.
    padded_vocab: rows of the embedding.
    """

    def __init__(self, folder: str | Path, arch: Architecture):
        self.folder = Folder(folder)
        self.arch = arch
        self._check_manifest()
        recorded_config.check(self.folder.path, arch)
        tensors = {key: stored for key, stored in self.folder.tensors.items() if not _OPTIMIZER.match(key)}
        self._prefix = _prefix(tensors, self.folder.path)
        self.style = _style(tensors)
        weights = weight_map(arch)
        self._stored_rows = {weight.name: self._find(weight, tensors) for weight in weights}
        used = {run.stored.key for stored_rows in self._stored_rows.values() for run in stored_rows}
        self.skipped = tuple(sorted(key for key in tensors.keys() - used if self._beyond(key)))
        self.keys = tuple(sorted(used))
        self._refuse(tensors.keys() - used - set(self.skipped))
        self.padded_vocab = self._stored_rows[EMBEDDING][0].stored.shape[0]

    def stored_rows(self, weight: Weight) -> tuple[StoredRows, ...]:
        return self._stored_rows[weight.name]

    def dtype(self, weight: Weight) -> torch.dtype:
        return self._stored_rows[weight.name][0].stored.dtype

    def whole(self, weight: Weight) -> Tensor:
        """In the type of the checkpoint, not to be written to; the rows that pad the vocabulary are left out."""
        return self.rows(weight, 0, weight.shape[0])

    def rows(self, weight: Weight, start: int, stop: int) -> Tensor:
        """Some of the rows of `whole`."""
        found = []
        for run in self._stored_rows[weight.name]:
            low, high = max(start, run.rows[0]), min(stop, run.rows[1])
            if low < high:
                shape = (high - low, *weight.shape[1:])
                found.append(self.folder.rows(run.stored, run.index, low - run.rows[0], shape))
                check_finite(found[-1], run.stored.key, self.folder.path)
        return found[0] if len(found) == 1 else torch.cat(found)

    def paths(self, weight: Weight) -> tuple[Path, ...]:
        """The files that hold something of a weight."""
        pieces = (piece for run in self._stored_rows[weight.name] for piece in run.stored.at(run.index))
        return tuple(dict.fromkeys(self.folder.path / piece.file for piece in pieces))

    def _check_manifest(self) -> None:
        """Check against the manifest, if any, that every file has its size and the checkpoint is one of this model."""
        path = self.folder.path
        if not (path / manifest.NAME).is_file():  # plain Megatron-Core writes none
            return
        found = manifest.read(path)
        if found.adapter is not None:
            raise UserError(
                f"{path} holds an adapter, not a model: give the folder of the model that it was trained on, and go on "
                "by checkpoint.resume=true, or from an export (isoloss-convert export-adapter) by lora.init"
            )
        manifest.check_sizes(path, found)
        for field in ("family", "vocab_size"):
            ours, theirs = getattr(self.arch, field), getattr(found, field)
            if ours != theirs:
                raise UserError(
                    f"{path / manifest.NAME}: {field}={theirs!r} where config.json says {ours!r}; the checkpoint and "
                    "config.json do not belong together"
                )

    def _find(self, weight: Weight, tensors: Mapping[str, StoredTensor]) -> tuple[StoredRows, ...]:
        stored_rows = []
        for place in checkpoint_rows(weight, self.arch, self.style):
            key = self._key(place.key, tensors)
            self._check_shape(weight, place, tensors[key])
            self.folder.boxes(tensors[key], place.index, 0, (place.rows[1] - place.rows[0], *weight.shape[1:]))
            stored_rows.append(StoredRows(tensors[key], place.index, place.rows))
        return tuple(stored_rows)

    def _key(self, key: str, tensors: Mapping[str, StoredTensor]) -> str:
        names = [self._prefix + name for name in _spellings(key, self.arch)]
        found = [name for name in names if name in tensors]
        if not found:
            raise UserError(
                f"{self.folder.path} lacks {names[0]}, which the model of its config.json has "
                f"({self.arch.family}, {self.arch.num_layers} layers); the two do not belong together"
            )
        return found[0]  # a second spelling is left over, and refused as such

    def _check_shape(self, weight: Weight, place: CheckpointRows, stored: StoredTensor) -> None:
        start, stop = place.rows
        wanted = (*place.axes, stop - start, *weight.shape[1:])
        if isinstance(weight.mapping, Vocabulary) and stored.shape[1:] == wanted[1:] and stored.shape[0] >= wanted[0]:
            wanted = stored.shape
        if stored.shape != wanted:
            raise UserError(
                f"{self.folder.path}: {stored.key} has shape {list(stored.shape)} where config.json calls for "
                f"{list(wanted)}; the checkpoint and config.json do not belong together"
            )
        if stored.dtype not in DTYPES:
            raise UserError(
                f"{self.folder.path}: {stored.key} is of type {stored.dtype}; supported are "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
            )

    def _beyond(self, key: str) -> bool:
        """Return whether a tensor belongs to layers for multi-token prediction, which take no part in the model."""
        return bool(self.arch.mtp_layers) and key.startswith(f"{self._prefix}mtp.")

    def _refuse(self, left_over: Iterable[str]) -> None:
        names = sorted(left_over)
        if names:
            raise UserError(
                f"{self.folder.path} has {names[0]} ({len(names)} such), a tensor that the model of its config.json "
                f"({self.arch.family}, {self.arch.num_layers} layers) does not have; the two do not belong together"
            )


def _prefix(tensors: Mapping[str, StoredTensor], folder: Path) -> str:
    """Return the prefix of all keys of the model, "" unless it was saved inside of a wrapper."""
    found = [key.removesuffix(EMBEDDING) for key in tensors if key.endswith(EMBEDDING)]
    if not found and any(".adapter." in key for key in tensors):
        raise UserError(
            f"{folder} holds adapters (LoRA) without the model that they belong to; merge them into it first, as "
            "examples/peft/merge_lora.py of Megatron-Bridge does"
        )
    if len(found) != 1 or not re.fullmatch(r"([a-z0-9_]+\.)*", found[0]):
        raise UserError(
            f"{folder} holds {len(found)} tensors named {EMBEDDING} where a checkpoint of a language model has one; "
            "give a checkpoint that Megatron-Core wrote"
        )
    return found[0]


def _style(tensors: Iterable[str]) -> Style:
    if not any(re.search(r"(^|\.)decoder\.layers\.\d+\.", key) for key in tensors):
        return Style.STACKED
    apart = re.compile(r"\.linear_fc1\.(weight|bias)_w$")
    return Style.SINGLETON if any(apart.search(key) for key in tensors) else Style.PER_LAYER


# Norms that Megatron-Core's specs of local experts and of latent attention call as if a dense MLP, or grouped-query
# attention, stood behind them.
_MIXED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}  # fmt: skip


def _spellings(key: str, arch: Architecture) -> tuple[str, ...]:
    """Return the names of a tensor: a norm is called as Transformer Engine's fused layers call it, or as it is in the
    local layer spec."""
    for pair in (*(pair for kind in arch.kinds for pair in kind.fused_norms().items()), *_MIXED.items()):
        for name, other in (pair, pair[::-1]):
            if f".{name}weight" in f".{key}":
                return key, key.replace(name, other)
    return (key,)
