"""What a file that `transfer` writes consists of: segments, one after the other.

The workers import this with the standard library alone (`worker_start`). A segment of another module may be written
as well, if that module, too, imports of isoloss only modules that do without its packages.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

PIECE_BYTES = 1 << 20  # small enough that what was read is still in the cache when it is hashed
MAX_OPEN_SOURCES = 64
Buffer = bytes | memoryview


class SourceError(Exception):
    """A source that is not what the plan was made from. The message names the file and the mend."""


class Sources:
    """Open source files and the one buffer that they are read into: a piece is good until the next one is read."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()
        self._buffer = memoryview(bytearray(PIECE_BYTES))

    def pieces(self, path: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Bytes [offset, offset + nbytes) of a file. Every piece but the last holds PIECE_BYTES."""
        while nbytes:
            piece = self._buffer[: min(nbytes, PIECE_BYTES)]
            self.read_into(piece, path, offset)
            yield piece
            offset, nbytes = offset + len(piece), nbytes - len(piece)

    def read_into(self, buffer: memoryview, path: str, offset: int) -> None:
        descriptor = self._descriptor(path)
        filled = 0
        while filled < len(buffer):
            try:
                got = os.preadv(descriptor, [buffer[filled:]], offset + filled)
            except OSError as error:
                raise SourceError(
                    f"{path} cannot be read at byte {offset + filled} ({error.strerror}); copy it again"
                ) from None
            if not got:
                raise SourceError(f"{path} ends at byte {offset + filled}, before what it should hold; copy it again")
            filled += got

    def announce(self, path: str, offset: int, nbytes: int) -> None:
        """Have the system read these bytes ahead, without waiting for them."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor(path), offset, nbytes, os.POSIX_FADV_WILLNEED)

    def _descriptor(self, path: str) -> int:
        if path in self._open:
            self._open.move_to_end(path)
        else:
            if len(self._open) == MAX_OPEN_SOURCES:
                os.close(self._open.popitem(last=False)[1])
            self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]


class Segment(Protocol):
    """A run of bytes of an output file. Frozen, picklable; its repr tells it apart from every other one."""

    @property
    def nbytes(self) -> int: ...

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that it is read from."""
        ...

    def read(self, sources: Sources) -> Iterator[Buffer]:
        """The bytes in pieces; a piece may be overwritten as soon as the next one is asked for."""
        ...


class _OfNoFile:
    __slots__ = ()
    paths: tuple[str, ...] = ()


class _OfFile:
    __slots__ = ()
    path: str

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,)


@dataclass(frozen=True, slots=True)
class Run(_OfFile):
    """`nbytes` bytes of a file, as they are."""

    path: str
    offset: int
    nbytes: int

    def read(self, sources: Sources) -> Iterator[Buffer]:
        return sources.pieces(self.path, self.offset, self.nbytes)

    def cut(self, most: int) -> Iterator["Run"]:
        """The same bytes in runs of at most so many."""
        for start in range(0, self.nbytes, most):
            yield Run(self.path, self.offset + start, min(most, self.nbytes - start))


@dataclass(frozen=True, slots=True)
class Literal(_OfNoFile):
    """Bytes that the plan holds itself."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read(self, sources: Sources) -> Iterator[Buffer]:
        yield self.data


@dataclass(frozen=True, slots=True)
class Zeros(_OfNoFile):
    nbytes: int

    def read(self, sources: Sources) -> Iterator[Buffer]:
        piece = bytes(min(self.nbytes, PIECE_BYTES))
        for start in range(0, self.nbytes, PIECE_BYTES):
            yield piece[: self.nbytes - start]


@dataclass(frozen=True, slots=True)
class Strided(_OfFile):
    """A view of a file, row by row: elements of `itemsize` bytes, the first of them at `offset`.

    shape, strides: of the view, in elements, one or two dims; strides are not negative. Holds the whole range of the
    file that the view spans in memory.
    """

    path: str
    offset: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = self.itemsize
        for length in self.shape:
            size *= length
        return size

    def read(self, sources: Sources) -> Iterator[Buffer]:
        import numpy  # no other segment needs it

        span = 1 + sum((length - 1) * stride for length, stride in zip(self.shape, self.strides))
        whole = memoryview(bytearray(span * self.itemsize))
        sources.read_into(whole, self.path, self.offset)
        dtype, strides = numpy.dtype(f"u{self.itemsize}"), tuple(stride * self.itemsize for stride in self.strides)
        view: numpy.ndarray = numpy.ndarray(self.shape, dtype, whole, strides=strides)
        # So few rows at a time that the cache lines of a column are still there when its neighbour is read.
        for start in range(0, self.shape[0], 64):
            yield numpy.ascontiguousarray(view[start : start + 64]).reshape(-1).view(numpy.uint8).data


@dataclass(frozen=True, slots=True)
class Cast:
    """Another segment in another floating-point type. source, target: names of torch dtypes.

    inner: its pieces hold whole numbers. tensor: the name to tell where a number does not fit the new type.
    """

    inner: Segment
    source: str
    target: str
    tensor: str

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes // _ITEMSIZE[self.source] * _ITEMSIZE[self.target]

    @property
    def paths(self) -> tuple[str, ...]:
        return self.inner.paths

    def read(self, sources: Sources) -> Iterator[Buffer]:
        import torch  # no other segment needs it

        torch.set_num_threads(1)  # the workers use the cores
        source, target = getattr(torch, self.source), getattr(torch, self.target)
        for piece in self.inner.read(sources):
            before = torch.frombuffer(piece, dtype=source)
            after = before.to(target)
            if torch.isinf(after).sum() != torch.isinf(before).sum():
                text = f"{self.tensor} in {self.inner.paths[0]} holds numbers too large for {self.target}"
                raise SourceError(f"{text}; choose another --dtype")
            yield after.view(torch.uint8).numpy().data


_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
