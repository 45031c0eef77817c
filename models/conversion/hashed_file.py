"""The files of a conversion: each written once, from its start to its end, and hashed on the way."""

import os
import zlib
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, uint8

PIECE_BYTES = 1 << 20  # small enough that what was hashed is still in the cache when it is written
FLUSH_BYTES = 16 << 20


class HashedFile:
    """A file that is being written. report: receives the number of bytes of each piece."""

    def __init__(self, path: Path, report: Callable[[int], None]):
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._crc32 = self._unflushed = 0
        self._report = report

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def add(self, data: Tensor | bytes) -> None:
        """Append the bytes of `data`; those of a tensor are its numbers, row-major."""
        rest = data.contiguous().view(-1).view(uint8).numpy().data if isinstance(data, Tensor) else memoryview(data)
        while rest:
            piece, rest = rest[:PIECE_BYTES], rest[PIECE_BYTES:]
            self._crc32 = zlib.crc32(piece, self._crc32)
            self._report(len(piece))
            self._unflushed += len(piece)
            write(self._descriptor, piece)
            if self._unflushed >= FLUSH_BYTES and hasattr(os, "posix_fadvise"):
                # Has the system begin, so that not all is left to fsync, and keep nothing that is on the disk.
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                self._unflushed = 0

    def finish(self) -> str:
        """Have everything on the disk; returns the CRC-32."""
        os.fsync(self._descriptor)
        return f"{self._crc32:08x}"


def write(descriptor: int, data: memoryview) -> None:
    """All of it: the system may take less at a time."""
    while data:
        data = data[os.write(descriptor, data) :]


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file and its folder. Not synced."""
    os.makedirs(path.parent, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write(descriptor, memoryview(data))
    finally:
        os.close(descriptor)
