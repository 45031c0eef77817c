"""What a safetensors file holds and where, read from its header alone.

Format: eight bytes with the length of the header (little endian), the header (JSON), then the tensors' bytes without
gaps. https://github.com/huggingface/safetensors
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from isoloss.parallel.errors import UserError

# The types that weights come in, as names of torch dtypes.
DTYPES: Mapping[str, str] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
ITEMSIZE: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. dtype: of safetensors, such as "BF16"; offset: of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """tensors: in the order of their bytes. metadata: the file's own, or None."""

    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str] | None


def read_header(path: Path) -> Header:
    """Raises UserError naming the file where it is cut short or its header makes no sense."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES + length:
            raise _cut_short(path, size, _LENGTH_BYTES + length)
        text = file.read(length)
    try:
        fields = json.loads(text)
        metadata = fields.pop("__metadata__", None)
        start = _LENGTH_BYTES + length
        tensors = [
            (name, Stored(str(entry["dtype"]), tuple(entry["shape"]), start + begin, end - begin))
            for name, entry in fields.items()
            for begin, end in [entry["data_offsets"]]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a safetensors file ({error!r}); copy it again") from None
    tensors.sort(key=lambda item: item[1].offset)
    expected = start
    for name, stored in tensors:
        itemsize = ITEMSIZE.get(DTYPES.get(stored.dtype, ""))
        wrong_size = itemsize and stored.nbytes != itemsize * math.prod(stored.shape)
        if stored.offset != expected or stored.nbytes < 0 or wrong_size:
            raise UserError(f"{path}: the header misplaces {name}; copy the file again")
        expected += stored.nbytes
    if size < expected:
        raise _cut_short(path, size, expected)
    if size > expected:
        raise UserError(f"{path} has {size:,} bytes where its header calls for {expected:,}; copy it again")
    return Header(dict(tensors), metadata)


def _cut_short(path: Path, size: int, expected: int) -> UserError:
    return UserError(
        f"{path} is cut short: it has {size:,} bytes where its header calls for {expected:,}; copy or download it again"
    )


def published_checksum(path: Path) -> tuple[str, str] | None:
    """The checksum that whoever wrote this file noted down for it, as `transfer.Source` takes it, and what to do where
    it differs; None: none did.

    Looks into the conversion.json of our own exports, the records that huggingface_hub keeps beside a download
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
