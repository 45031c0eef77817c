"""Segments of an output file that are put together from several places.

Like `segments`, which the workers import as well, this module needs little more than the standard library.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from isoloss.models.conversion.segments import PIECE_BYTES, Buffer, Segment, SourceError, Sources

# So few rows at a time that the cache lines of a column are still there when its neighbour is read.
VIEW_ROWS = 64


@dataclass(frozen=True, slots=True)
class Intact:
    """No bytes of its own, but the condition for those that follow: these of a file have this checksum."""

    path: str
    offset: int
    length: int
    crc32: int

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,)

    def read(self, sources: Sources) -> Iterator[Buffer]:
        found = 0
        for piece in sources.pieces(self.path, self.offset, self.length):
            found = zlib.crc32(piece, found)
        if found != self.crc32:
            raise SourceError(f"{self.path} is damaged at byte {self.offset} or behind it; copy the checkpoint again")
        return iter(())


@dataclass(frozen=True, slots=True)
class Columns:
    """A block of a matrix in a file: all rows, `nbytes` of each, one row right behind the other from `offset` on."""

    path: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SideBySide:
    """A matrix of `rows` rows from blocks of its columns, left to right."""

    blocks: tuple[Columns, ...]
    rows: int

    @property
    def nbytes(self) -> int:
        return self.rows * sum(block.nbytes for block in self.blocks)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(block.path for block in self.blocks)

    def read(self, sources: Sources) -> Iterator[Buffer]:
        import numpy

        width = sum(block.nbytes for block in self.blocks)
        step = max(1, PIECE_BYTES // width)
        for start in range(0, self.rows, step):
            rows = min(step, self.rows - start)
            whole, left = numpy.empty((rows, width), numpy.uint8), 0
            for block in self.blocks:
                columns = numpy.empty((rows, block.nbytes), numpy.uint8)
                sources.read_into(columns.reshape(-1).data, block.path, block.offset + start * block.nbytes)
                whole[:, left : left + block.nbytes] = columns
                left += block.nbytes
            yield whole.reshape(-1).data


@dataclass(frozen=True, slots=True)
class Viewed:
    """A tensor that is collected from `parts`, then read through strides: a transposed or an interleaved matrix.

    shape, strides: in elements of `itemsize` bytes, strides not negative. Holds all of `parts` in memory.
    """

    parts: tuple[Segment, ...]
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(path for part in self.parts for path in part.paths)

    def read(self, sources: Sources) -> Iterator[Buffer]:
        import numpy

        whole, filled = bytearray(self.nbytes), 0
        for part in self.parts:
            for piece in part.read(sources):
                whole[filled : filled + len(piece)] = piece
                filled += len(piece)
        strides = tuple(stride * self.itemsize for stride in self.strides)
        view: numpy.ndarray = numpy.ndarray(self.shape, f"u{self.itemsize}", whole, strides=strides)
        for start in range(0, self.shape[0], VIEW_ROWS):
            yield numpy.ascontiguousarray(view[start : start + VIEW_ROWS]).reshape(-1).view(numpy.uint8).data
