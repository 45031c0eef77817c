"""`huggingface/shards.json` in a converted checkpoint: which tensor was in which safetensors file, and how.

With it the way back can make every file what it was.
"""

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from isoloss.models.conversion.safetensors_header import Header
from isoloss.models.families.registry import HUGGINGFACE
from isoloss.models.weights.manifest import read_json
from isoloss.parallel.errors import UserError

SHARDS = "shards.json"


@dataclass(frozen=True)
class Shard:
    """A safetensors file. tensors: their types, such as "BF16", in the order of their bytes. metadata: of its header,
    or None."""

    tensors: Mapping[str, str]
    metadata: Mapping[str, str] | None


@dataclass(frozen=True)
class ShardLayout:
    """files: by name, in the order of the index. indexed: whether an index goes with them."""

    files: Mapping[str, Shard]
    indexed: bool

    def to_json(self) -> str:
        files = {name: {"metadata": file.metadata, "tensors": dict(file.tensors)} for name, file in self.files.items()}
        return json.dumps({"indexed": self.indexed, "files": files}, indent=1) + "\n"


def shard_layout(headers: Mapping[str, Header], names: Set[str], indexed: bool) -> ShardLayout:
    """The layout of the files with these headers, as far as these tensors go."""
    files = {
        file: Shard({name: stored.dtype for name, stored in header.tensors.items() if name in names}, header.metadata)
        for file, header in headers.items()
    }
    return ShardLayout({file: shard for file, shard in files.items() if shard.tensors}, indexed)


def read_shard_layout(checkpoint: Path) -> ShardLayout | None:
    """The layout that a converted checkpoint remembers, or None. Raises UserError where it is damaged."""
    path = checkpoint / HUGGINGFACE / SHARDS
    if not path.exists():
        return None
    fields = read_json(path, "copy or convert the checkpoint again")
    try:
        files = {
            name: Shard({tensor: str(dtype) for tensor, dtype in file["tensors"].items()}, file["metadata"])
            for name, file in fields["files"].items()
        }
        return ShardLayout(files, bool(fields["indexed"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error!r}); copy or convert the checkpoint again") from None
