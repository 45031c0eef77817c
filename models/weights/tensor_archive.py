"""Find the numbers of a tensor in a file of `torch.save`, without unpickling the archive's content."""

import io
import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isoloss.models.weights import restricted_pickle
from isoloss.models.weights.restricted_pickle import Name, RefusedError, axes

Shape = tuple[int, ...]
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Payload:
    """The numbers of a tensor, row-major and little-endian, at this offset of its archive.

    crc32: their checksum, 0 where the writer left it out.
    """

    offset: int
    dtype: torch.dtype
    shape: Shape
    crc32: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def locate(archive: memoryview) -> Payload:
    """The payload of an archive of one tensor. Raises an error of some kind where it is anything else, or damaged."""
    with zipfile.ZipFile(_View(archive)) as file:
        records = {info.filename.partition("/")[2]: info for info in file.infolist()}
    pickled = bytes(_record(archive, records["data.pkl"]))
    dtype, storage, shape = restricted_pickle.read(pickled, _find, _storage)  # (dtype, name of the storage, shape)
    if "byteorder" in records and bytes(_record(archive, records["byteorder"])) != b"little":
        raise ValueError("numbers are not little-endian")
    record = records[f"data/{storage}"]
    payload = Payload(_start(archive, record), dtype, shape, record.CRC)
    if record.file_size != payload.nbytes:
        raise ValueError(f"{record.file_size} bytes for a tensor of {payload.nbytes}")
    return payload


def _record(archive: memoryview, record: zipfile.ZipInfo) -> memoryview:
    """The bytes of a record. Not by `ZipFile.read`: it insists on checksums, which writers may leave out."""
    start = _start(archive, record)
    return archive[start : start + record.file_size]


def _start(archive: memoryview, record: zipfile.ZipInfo) -> int:
    """Return a record's offset: after a header of 30, a name and an extra field, whose lengths are at 26 and 28."""
    lengths = archive[record.header_offset + 26 : record.header_offset + 30]
    name, extra = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
    start = record.header_offset + 30 + name + extra
    if record.compress_type != zipfile.ZIP_STORED or start + record.file_size > len(archive):
        raise ValueError(f"{record.filename} is compressed, or reaches beyond the end")
    return start


def _find(module: str, name: str) -> Any:
    if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
        return Name(f"{module}.{name}", called=_describe)
    if (module, name) == ("collections", "OrderedDict"):
        return Name(f"{module}.{name}", called=lambda: {})
    if module == "torch" and name in _STORAGES:
        return _STORAGES[name]
    raise RefusedError(f"{module}.{name} has no place in a tensor")


def _storage(persistent_id: Any) -> tuple[torch.dtype, str]:
    _, dtype, name, *_ = persistent_id
    return dtype, name


def _describe(
    storage: tuple[torch.dtype, str], offset: int, size: tuple[int, ...], stride: Sequence[int], *rest: Any
) -> tuple[torch.dtype, str, Shape]:
    """Stands for torch's function of the same signature; refuses a tensor that is not its storage, in order."""
    shape, run = axes(size), 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != run:
            raise ValueError(f"strides {list(stride)} of shape {list(shape)}")
        run *= length
    if offset:
        raise ValueError(f"offset {offset} in its storage")
    return *storage, shape


class _View(io.RawIOBase):
    """The interface of a file to memory, without a copy of it."""

    def __init__(self, view: memoryview):
        self._memory, self._at = view, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._memory)}[whence]
        if start + offset < 0:
            raise ValueError("before the start")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = len(self._memory) if size is None or size < 0 else self._at + size
        data = bytes(self._memory[self._at : stop])
        self._at += len(data)
        return data
