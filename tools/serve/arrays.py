"""Arrays out of the bytes that a client sends, within limits.

Shapes: T tokens of a datum, K numbers at a position.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from isoloss.parallel.runtime.errors import UserError
from isoloss.tools.serve import messages

DTYPES = {messages.FLOAT32: np.dtype("<f4"), messages.INT64: np.dtype("<i8")}
# A decompressor keeps a window of what it wrote. RFC 8878 asks every decoder for 8 MiB.
LEAST_WINDOW = 2**23
BLOCK = 2**16
LONGEST_SHOWN = 60


class BadRequest(UserError):
    """A request that is refused: the client's fault, in one line."""


@dataclass(frozen=True)
class Limits:
    """The most that a request may have. The key of each is serve.max_ and its name.

    body_bytes: bytes of the body as it travels.
    decompressed_bytes: bytes of the body after decompression, and of all its arrays after sparse ones became dense.
    datums: datums of a request.
    tokens: tokens of a datum.
    """

    body_bytes: int
    decompressed_bytes: int
    datums: int
    tokens: int

    def check(self, name: str, value: int, what: str) -> None:
        """Raise BadRequest if there is more than the limit of that name allows."""
        limit = getattr(self, name)
        if value > limit:
            raise BadRequest(f"{what}: serve.max_{name}={limit} allows no more; send less at once, or raise it")


class Room:
    """Count the bytes of arrays before they are made."""

    def __init__(self, limits: Limits):
        self.limits, self.bytes = limits, 0

    def take(self, where: str, count: int) -> None:
        """Raise BadRequest if these bytes, with those before, are more than the limit allows."""
        self.bytes += count
        self.limits.check("decompressed_bytes", self.bytes, f"{where}: the arrays so far have {self.bytes} bytes")


def decompressed(body: bytes, encoding: str | None, limits: Limits) -> bytes:
    """Return the body without its compression."""
    if encoding is not None and encoding not in ("identity", "zstd"):
        raise BadRequest(f"Content-Encoding {shown(encoding)}: send zstd or none")
    if encoding == "zstd":
        window = max(limits.decompressed_bytes, LEAST_WINDOW)
        decompressor = zstandard.ZstdDecompressor(max_window_size=window)
        try:
            size = 0
            # Counted first, and kept afterwards: 4 bytes may become 128 KiB.
            with decompressor.stream_reader(body) as stream:
                while block := stream.read(BLOCK):
                    size += len(block)
                    limits.check("decompressed_bytes", size, "the body decompresses to more bytes than allowed")
            frame = decompressor.decompressobj()
            body = frame.decompress(body)
        except (zstandard.ZstdError, MemoryError) as error:
            raise BadRequest(f"the body is not zstd as its Content-Encoding says: {_one_line(error)}") from error
        if not frame.eof or frame.unused_data:
            raise BadRequest("the body is not one whole frame of zstd as its Content-Encoding says: send it again")
    limits.check("decompressed_bytes", len(body), f"the body has {len(body)} bytes after decompression")
    return body


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def shown(name: str) -> str:
    """Return a client's own word as part of a line: quoted, and cut if it is long."""
    return repr(name if len(name) <= LONGEST_SHOWN else name[:LONGEST_SHOWN] + "...")


def tensor(where: str, message: Any, length: int, room: Room) -> np.ndarray:
    """Return the dense array of a Tensor, [length] or [length, K]. Where no shape is sent it has one dimension."""
    dtype = DTYPES.get(message.dtype)
    if dtype is None:
        known = messages.ENUMS["DType"]
        name = known[message.dtype] if 0 <= message.dtype < len(known) else f"number {message.dtype}"
        raise BadRequest(f"{where} has the dtype {name}: send float32 or int64")
    sparse = message.WhichOneof("encoding") == "sparse_csr"
    # Checked before anything is made of these sizes.
    shape: list[int] = list(message.shape) or [len(message.dense) // dtype.itemsize]
    if len(shape) > 2 or shape[0] != length or min(shape) < 1:
        text = str(tuple(shape)) if len(shape) < 5 else f"of {len(shape)} dimensions"
        raise BadRequest(f"{where} has the shape {text}: the tokens ask for ({length},) or ({length}, K)")
    if sparse and len(shape) != 2:
        raise BadRequest(f"{where} is sparse and has the shape {tuple(shape)}: sparse tensors have two dimensions")
    size = math.prod(shape)
    room.take(where, size * dtype.itemsize)
    if sparse:
        array = _dense(where, message.sparse_csr, (shape[0], shape[1]), dtype)
    else:
        array = numbers(where, message.dense, dtype)
        if size != array.size:
            raise BadRequest(
                f"{where} has the shape {tuple(shape)} and {array.size} numbers: they contradict each other"
            )
        array = array.reshape(shape)
    if not np.isfinite(array).all():
        raise BadRequest(f"{where} has a number that is NaN or infinite: mask it out by a weight of 0 and send 0")
    array.flags.writeable = False
    return array


def _dense(where: str, message: Any, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Return the dense array of compressed sparse rows: row r has entries crow[r] to crow[r + 1] of values."""
    rows, columns = shape
    values = numbers(where, message.values, dtype)
    crow, col = (numbers(where, part, np.dtype("<i8")) for part in (message.crow_indices, message.col_indices))
    if len(crow) != rows + 1 or crow[0] != 0 or crow[-1] != len(values) or (crow[1:] < crow[:-1]).any():
        raise BadRequest(f"{where}: crow_indices must rise from 0 to {len(values)}, the values, in {rows + 1} numbers")
    if len(col) != len(values) or ((col < 0) | (col >= columns)).any():
        raise BadRequest(f"{where}: col_indices must be {len(values)} numbers from 0 to {columns - 1}")
    row = np.repeat(np.arange(rows), np.diff(crow))
    if ((row[1:] == row[:-1]) & (col[1:] <= col[:-1])).any():
        raise BadRequest(f"{where}: col_indices of a row must rise, each once")
    dense = np.zeros(shape, dtype)
    dense[row, col] = values
    return dense


def numbers(where: str, data: bytes, dtype: np.dtype) -> np.ndarray:
    """Return the numbers of that type in these bytes, without a copy."""
    if len(data) % dtype.itemsize:
        raise BadRequest(f"{where} has {len(data)} bytes: no whole number of {dtype.name}")
    return np.frombuffer(data, dtype)
