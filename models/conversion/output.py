"""The files of a conversion: each written once, from its start to its end, and hashed on the way."""

import errno
import fcntl
import mmap
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor, uint8

# Files are written past the page cache where that is possible: it costs half as much of a processor, and the disk
# works while other threads hash. Elsewhere the system is asked now and then to begin, so that not all is left to fsync.
BUFFER_BYTES, BLOCK_BYTES = 8 << 20, 4096
PIECE_BYTES = 1 << 20  # small enough that what was copied is still in the cache when it is hashed


class Output:
    """A file that is being written. report: is told how many bytes were."""

    def __init__(self, path: Path, report: Callable[[int], None]):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._direct = getattr(os, "O_DIRECT", 0)
        try:
            self._descriptor = os.open(path, flags | self._direct, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that has no such thing
                raise
            self._direct = 0
            self._descriptor = os.open(path, flags, 0o666)
        # A mapping starts at a page, as such files want it. numpy copies without holding other threads up.
        memory = mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._buffer = np.frombuffer(memory, np.uint8)
        self._filled = self._crc32 = 0
        self._report = report

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def add(self, data: Tensor | bytes) -> None:
        """The bytes of a tensor are its numbers, row-major."""
        if isinstance(data, Tensor):
            rest = data.contiguous().view(-1).view(uint8).numpy()
        else:
            rest = np.frombuffer(data, np.uint8)
        while len(rest):
            piece = self._buffer[self._filled :][: min(len(rest), PIECE_BYTES)]
            np.copyto(piece, rest[: len(piece)])
            self._crc32 = zlib.crc32(piece.data, self._crc32)
            self._filled += len(piece)
            rest = rest[len(piece) :]
            if self._filled == BUFFER_BYTES:
                self._write(BUFFER_BYTES)

    def finish(self) -> str:
        """Have everything on the disk; returns the CRC-32."""
        rest = self._filled % BLOCK_BYTES
        self._write(self._filled - rest)
        self._leave_direct()
        self._write(rest)
        os.fsync(self._descriptor)
        return f"{self._crc32:08x}"

    def _write(self, nbytes: int) -> None:
        """Write so many bytes from the start of the buffer, and have the others follow from there."""
        rest = self._buffer[:nbytes].data
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._leave_direct()  # a file system with blocks of another size
        if not self._direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self._filled -= nbytes
        self._buffer[: self._filled] = self._buffer[nbytes : nbytes + self._filled].copy()
        self._report(nbytes)

    def _leave_direct(self) -> None:
        if self._direct:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~self._direct)
            self._direct = 0


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file and its folder. Not synced."""
    os.makedirs(path.parent, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)
