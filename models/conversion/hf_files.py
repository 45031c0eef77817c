"""The safetensors files of a Hugging Face folder, laid out before a byte of them is written.

Headers are those that the safetensors library writes, so a model that was converted there and back is the same files
again.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from isoloss.models.conversion.safetensors_header import DTYPES, ITEMSIZE
from isoloss.models.conversion.shard_layout import ShardLayout
from isoloss.models.weights.hf_checkpoint import MAX_SHARD_BYTES, SINGLE
from isoloss.parallel.errors import UserError

_HEADER_MULTIPLE = 8
# As the safetensors library orders tensors in a file: by type, then by name.
_TYPE_ORDER = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class HFTensor:
    """dtype: of safetensors, such as "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[DTYPES[self.dtype]]


@dataclass(frozen=True)
class HFFile:
    """A file and its tensors, in the order of their bytes. metadata: of its header, or None."""

    name: str
    tensors: tuple[HFTensor, ...]
    metadata: Mapping[str, str] | None = field(default_factory=lambda: {"format": "pt"})

    def header(self) -> bytes:
        """Everything in front of the first tensor's bytes."""
        entries: dict[str, object] = {} if self.metadata is None else {"__metadata__": dict(self.metadata)}
        start = 0
        for tensor in self.tensors:
            stop = start + tensor.nbytes
            entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, stop]}
            start = stop
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _HEADER_MULTIPLE)
        return len(text).to_bytes(8, "little") + text


def arrange(tensors: Sequence[HFTensor], max_bytes: int = MAX_SHARD_BYTES) -> tuple[HFFile, ...]:
    """Files of at most `max_bytes`, in the order of `tensors`; a tensor larger than that has one of its own."""
    shards: list[list[HFTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if filled and filled + tensor.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    n = len(shards)
    names = [SINGLE] if n == 1 else [f"model-{k + 1:05d}-of-{n:05d}.safetensors" for k in range(n)]
    return tuple(HFFile(name, _in_file_order(members)) for name, members in zip(names, shards))


def arrange_as(layout: ShardLayout, tensors: Sequence[HFTensor]) -> tuple[HFFile, ...]:
    """The files of a layout that was recorded. Raises UserError where it is not one of these tensors."""
    by_name = {tensor.name: tensor for tensor in tensors}
    recorded = {name for file in layout.files.values() for name in file.tensors}
    if recorded != by_name.keys():
        name = min(recorded ^ by_name.keys())
        raise UserError(
            f"{name} {'was' if name in recorded else 'was not'} among the published tensors of the model, and is "
            f"{'not ' if name in recorded else ''}among those of its config.json; the two do not belong together"
        )
    return tuple(
        HFFile(name, tuple(by_name[tensor] for tensor in file.tensors), file.metadata)
        for name, file in layout.files.items()
    )


def index_text(files: Iterable[HFFile]) -> str:
    """The text of model.safetensors.index.json."""
    file_of = {tensor.name: (tensor.nbytes, file.name) for file in files for tensor in file.tensors}
    index = {
        "metadata": {"total_size": sum(nbytes for nbytes, _ in file_of.values())},
        "weight_map": {name: file for name, (_, file) in sorted(file_of.items())},
    }
    return json.dumps(index, indent=2) + "\n"


def _in_file_order(tensors: Iterable[HFTensor]) -> tuple[HFTensor, ...]:
    return tuple(sorted(tensors, key=lambda tensor: (_TYPE_ORDER.index(tensor.dtype), tensor.name)))
