"""The plan of a conversion: every file to write and its contents, before a byte moves."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from isoloss.models.conversion.tensors import KeptTensor, MergedRows, SplitPart, UpdatedTensor
from isoloss.models.weights.manifest import FileRecord
from isoloss.parallel.runtime.errors import UserError

# What a file consists of: tensors, bytes, or the bytes of a small file. Any thread may ask tensors for their blocks,
# which raise UserError where a source is damaged; the repr of tensors is unique.
Content = MergedRows | SplitPart | KeptTensor | UpdatedTensor | bytes | Path


@dataclass(frozen=True)
class OutputFile:
    """name: relative to the target, with "/". contents: what it consists of, one after the other."""

    name: str
    contents: tuple[Content, ...]

    @property
    def nbytes(self) -> int:
        return sum(
            len(part) if isinstance(part, bytes) else part.stat().st_size if isinstance(part, Path) else part.nbytes
            for part in self.contents
        )

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that it is read from."""
        parts = (part for part in self.contents if not isinstance(part, bytes))
        paths = (path for part in parts for path in ((part,) if isinstance(part, Path) else part.paths))
        return tuple(dict.fromkeys(paths))

    def blocks(self) -> Iterator[Tensor | bytes]:
        for part in self.contents:
            if isinstance(part, bytes | Path):
                yield part if isinstance(part, bytes) else part.read_bytes()
            else:
                yield from part.blocks()


@dataclass(frozen=True)
class Source:
    """A file that is read.

    nbytes, mtime_ns: size and time of change when the plan was made.
    checksum: the publisher's checksum to compare, sha256:HEX or crc32:HEX, or None.
    mend: advice where the checksum differs.
    """

    path: Path
    nbytes: int
    mtime_ns: int
    checksum: str | None
    mend: str

    @classmethod
    def of(cls, path: Path, checksum: str | None = None, mend: str = "copy it again") -> "Source":
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns, checksum, mend)


@dataclass(frozen=True)
class FilePlan:
    """files: written by the threads, in about this order.
    sources: every file that they are read from.

    manifest: name of the last file, and its text from the records of all others.
    """

    files: tuple[OutputFile, ...]
    sources: tuple[Source, ...]
    manifest: tuple[str, Callable[[Mapping[str, FileRecord]], str]]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def published_checksum(path: Path) -> tuple[str, str] | None:
    """Return the checksum that the file's publisher recorded, as `Source.of` takes it, and the advice where it
    differs; None without a record.

    Looks into the conversion.json of our own exports, the records that huggingface_hub keeps next to a download
    (`.cache/huggingface/download/NAME.metadata`, whose second line is the sha256 of a large file), and the file's name
    in the hub's cache, where a snapshot is made of links to `blobs/SHA256`.
    """
    own = path.parent / "conversion.json"
    if own.is_file():
        try:
            found = json.loads(own.read_text(encoding="utf-8"))["files"].get(path.name)
            if found:
                return f"crc32:{found['crc32']}", "convert it again"
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{own} is damaged; delete it to go without the checksums in it") from None
    record = path.parent / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
    if record.is_file():
        lines = record.read_text(encoding="utf-8").split("\n")
        if len(lines) > 1 and _is_sha256(lines[1].strip()):
            mend = f"download it again, or delete {record} if you changed the file yourself"
            return f"sha256:{lines[1].strip()}", mend
    target = Path(os.path.realpath(path))
    if path.is_symlink() and target.parent.name == "blobs" and _is_sha256(target.name):
        return f"sha256:{target.name}", "delete it and download it again"
    return None


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")
