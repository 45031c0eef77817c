"""The safetensors files of a Hugging Face folder, laid out before a byte of them is written.

Headers are those that the safetensors library writes, so a model that was converted there and back is the same files
again.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path

from isoloss.models.architecture import Architecture
from isoloss.models.conversion.plan import OutputFile
from isoloss.models.families.registry import HUGGINGFACE
from isoloss.models.weights.hf_checkpoint import (
    INDEX,
    MAX_SHARD_BYTES,
    SHARDS,
    HFReader,
    is_file_name,
    shard_names,
)  # fmt: skip
from isoloss.models.weights.manifest import read_json
from isoloss.models.weights.mmap import DTYPES
from isoloss.models.weights.side_files import as_written, declared_stops, read_config, sidecars
from isoloss.parallel.runtime.errors import UserError

_HEADER_MULTIPLE = 8
# As the safetensors library orders tensors in a file: by type, then by name.
_TYPE_ORDER = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class Shard:
    """A safetensors file.

    tensors: their types, such as "BF16", in the order of their bytes.
    metadata: metadata of the file's header, or None."""

    tensors: Mapping[str, str]
    metadata: Mapping[str, str] | None


@dataclass(frozen=True)
class ShardLayout:
    """The weight files of a folder, by name, in the order of the index. indexed: whether there is an index."""

    files: Mapping[str, Shard]
    indexed: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def of(cls, reader: HFReader, names: Set[str]) -> "ShardLayout":
        """Return the layout of a Hugging Face folder, restricted to the tensors `names`."""
        files = {}
        for file in dict.fromkeys(reader.file_of.values()):
            handle = reader.opened(file)
            tensors = {name: reader.dtype(name) for name in handle.offset_keys() if name in names}
            if tensors:
                files[file] = Shard(tensors, handle.metadata())
        return cls(files, (reader.folder / INDEX).is_file())

    @classmethod
    def read(cls, checkpoint: Path) -> "ShardLayout | None":
        """The one that a converted checkpoint remembers, or None. Raises UserError where it is damaged."""
        path = checkpoint / HUGGINGFACE / SHARDS
        if not path.exists():
            return None
        fields = read_json(path, "copy or convert the checkpoint again")
        try:
            files = {
                name: Shard({tensor: str(dtype) for tensor, dtype in file["tensors"].items()}, file["metadata"])
                for name, file in fields["files"].items()
            }
            if outside := [name for name in files if not is_file_name(name)]:
                raise ValueError(f"{outside[0]!r} is no file of a folder")
            return cls(files, bool(fields["indexed"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error!r}); copy or convert the checkpoint again") from None


@dataclass(frozen=True)
class HFTensor:
    """A tensor of a Hugging Face file. dtype: type in safetensors' spelling, such as "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class HFFile:
    """A file and its tensors, in the order of their bytes. metadata: metadata of the header, or None."""

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
    return tuple(HFFile(name, _in_file_order(members)) for name, members in zip(shard_names(len(shards)), shards))


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


def other_files(folder: Path, arch: Architecture, prefix: str = "", *, whole: bool = False) -> list[OutputFile]:
    """Return a folder's files other than weights: config.json (see `as_written`), tokenizer and the like. Raises
    UserError where generation_config.json is not one."""
    declared_stops(folder)
    config = OutputFile(f"{prefix}config.json", (as_written(read_config(folder), arch, whole=whole).encode(),))
    return [config, *(OutputFile(prefix + name, (folder / name,)) for name in sidecars(folder))]


def _in_file_order(tensors: Iterable[HFTensor]) -> tuple[HFTensor, ...]:
    return tuple(sorted(tensors, key=lambda tensor: (_TYPE_ORDER.index(tensor.dtype), tensor.name)))
