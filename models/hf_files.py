"""The safetensors files of a Hugging Face folder, laid out before a byte of them is written.

Headers are the ones that the safetensors library writes, so a model that was converted there and back is the same
files again.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from isoloss.models.checkpoint_hf import MAX_SHARD_BYTES, SINGLE

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_HEADER_MULTIPLE = 8


@dataclass(frozen=True)
class HFTensor:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class HFFile:
    """A file and its tensors, in the order of their bytes."""

    name: str
    tensors: tuple[HFTensor, ...]

    def header(self) -> bytes:
        """Everything in front of the first tensor's bytes."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for tensor in self.tensors:
            stop = start + tensor.nbytes
            entries[tensor.name] = {
                "dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop],
            }  # fmt: skip
            start = stop
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _HEADER_MULTIPLE)
        return len(text).to_bytes(8, "little") + text


def arrange(
    tensors: Sequence[HFTensor], file_of: Mapping[str, str] | None, max_bytes: int = MAX_SHARD_BYTES
) -> tuple[HFFile, ...]:
    """The files of a model. file_of: the file of each tensor where that is known, else files of at most `max_bytes`
    in the order of `tensors` (a larger tensor has one of its own)."""
    names = _fill(tensors, max_bytes) if file_of is None else {tensor.name: file_of[tensor.name] for tensor in tensors}
    members: dict[str, list[HFTensor]] = {}
    for tensor in tensors:
        members.setdefault(names[tensor.name], []).append(tensor)
    return tuple(HFFile(name, _in_file_order(members[name])) for name in sorted(members))


def index_text(files: Iterable[HFFile]) -> str:
    """model.safetensors.index.json, as transformers writes it."""
    tensors = {tensor.name: (tensor, file.name) for file in files for tensor in file.tensors}
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(tensor.shape) for tensor, _ in tensors.values()),
            "total_size": sum(tensor.nbytes for tensor, _ in tensors.values()),
        },
        "weight_map": {name: file for name, (_, file) in sorted(tensors.items())},
    }
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _fill(tensors: Sequence[HFTensor], max_bytes: int) -> dict[str, str]:
    shard_of: dict[str, int] = {}
    shard = filled = 0
    for tensor in tensors:
        if filled and filled + tensor.nbytes > max_bytes:
            shard, filled = shard + 1, 0
        shard_of[tensor.name] = shard
        filled += tensor.nbytes
    if not shard:
        return dict.fromkeys(shard_of, SINGLE)
    return {name: f"model-{k + 1:05d}-of-{shard + 1:05d}.safetensors" for name, k in shard_of.items()}


def _in_file_order(tensors: Iterable[HFTensor]) -> tuple[HFTensor, ...]:
    """As the safetensors library orders them: wide types first, then BF16 before F16, then by name."""
    types = list(DTYPES)
    return tuple(sorted(tensors, key=lambda tensor: (types.index(tensor.dtype), tensor.name)))
