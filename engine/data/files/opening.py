"""Open files that may be compressed, and limit how much a few bytes may grow."""

import gzip
import io
from pathlib import Path
from typing import Any

from isoloss.parallel.runtime.errors import UserError

# Bytes in memory per byte of a file, and bytes that any file may have: compression lets a few bytes stand for
# terabytes of the same text. No real file comes near, not even one whose rows all repeat a long system prompt.
MAX_GROWTH, FREE_BYTES = 10_000, 64 << 20
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"  # what compressed files begin with, whatever their names
COMPRESSED = (".gz", ".zst")


class Growth:
    """Counts the bytes that are read of a file. path, key: of the file, for the message."""

    def __init__(self, path: str, key: str):
        self._path, self._key = path, key
        self._left = max(FREE_BYTES, MAX_GROWTH * Path(path).stat().st_size)

    def add(self, count: int, what: str) -> None:
        """Count bytes. Raises UserError if they are too many. what: words for that which holds them all."""
        self._left -= count
        if self._left < 0:
            raise UserError(
                f"{self._key}: {self._path}: {what} hold more than {MAX_GROWTH:,} times the bytes of the file: drop "
                "rows that repeat, or give them as JSON Lines"
            )


class _Limited(io.RawIOBase):
    """Reads a decompressed stream up to the limit of its growth."""

    def __init__(self, stream: Any, growth: Growth):
        self._stream, self._growth = stream, growth

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._growth.add(len(data), "its rows")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def open_bytes(path: str, key: str) -> io.BufferedReader:
    """Open a file, decompressed if it begins as gzip or zstd files do. Reading raises UserError beyond the limit of
    its growth."""
    file = open(path, "rb")  # noqa: SIM115 -- the caller closes it
    begin = file.peek(len(ZSTD))
    if begin.startswith(GZIP):
        return io.BufferedReader(_Limited(gzip.GzipFile(fileobj=file), Growth(path, key)), io.DEFAULT_BUFFER_SIZE * 16)
    if begin.startswith(ZSTD):
        import pyarrow as pa

        file.close()
        return io.BufferedReader(_Limited(pa.input_stream(path, compression="zstd"), Growth(path, key)), 1 << 17)
    return file
