"""What a model folder holds besides weights, planned as files of a `transfer`: the same going there and back.

A checkpoint keeps it under `huggingface/`, and with it `shards.json`: which tensor was in which safetensors file, so
that the way back can give every file the name and the tensors that it had.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from isoloss.models.architecture import Architecture
from isoloss.models.checkpoint_hf import SIDECARS, config_text
from isoloss.models.manifest import read_json
from isoloss.models.safetensors_header import Header
from isoloss.models.transfer import OutputFile
from isoloss.models.transfer_worker import Literal, Run
from isoloss.parallel.errors import UserError

HUGGINGFACE = "huggingface"
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


def shard_layout(headers: Mapping[str, Header], indexed: bool) -> ShardLayout:
    """The layout of the files with these headers."""
    files = {
        name: Shard({tensor: stored.dtype for tensor, stored in header.tensors.items()}, header.metadata)
        for name, header in headers.items()
    }
    return ShardLayout(files, indexed)


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


def sidecar_files(source: Path, arch: Architecture, prefix: str = "") -> tuple[OutputFile, ...]:
    """config.json, tokenizer, chat template and generation defaults of `source`, as `checkpoint_hf.copy_sidecars`
    copies them. prefix: goes before each name, such as "huggingface/"."""
    files = [OutputFile(f"{prefix}config.json", (Literal(config_text(source, arch).encode()),))]
    for name in SIDECARS:
        path = source / name
        found = sorted(inner for inner in path.rglob("*") if inner.is_file()) if path.is_dir() else [path]
        files += [
            OutputFile(f"{prefix}{inner.relative_to(source).as_posix()}", (Run(str(inner), 0, inner.stat().st_size),))
            for inner in found
            if inner.is_file()
        ]
    return tuple(files)
