"""From where in a checkpoint's files a Hugging Face tensor is copied: its bytes as segments of an output file.

What `Form.split` does to a weight is found by splitting the numbers of its rows, so that there is one map between the
two formats and not two; the two forms that turn rows into columns are read through strides instead.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from isoloss.models.conversion.joined_segments import Columns, Intact, SideBySide, Viewed
from isoloss.models.conversion.segments import Cast, Run, Segment
from isoloss.models.weights.checkpoint_read import CheckpointWeights, Spot
from isoloss.models.weights.mappings import Form, InterleavedGateUp, TransposedRows
from isoloss.models.weights.weight_map import Weight
from isoloss.parallel.errors import UserError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Rows and columns (start, stop) of a weight; they stand at `offset` of a file, one row right behind the other.

    check: of the piece that they are from; its crc32 is 0 where there is none.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    path: str
    offset: int
    check: Intact


@dataclass(frozen=True)
class Band:
    """Rows (start, stop) of a weight and the boxes that they consist of, left to right."""

    rows: tuple[int, int]
    boxes: tuple[Box, ...]

    def segment(self, start: int, stop: int, itemsize: int) -> Segment:
        """Some of these rows."""
        blocks = []
        for box in self.boxes:
            nbytes = (box.columns[1] - box.columns[0]) * itemsize
            blocks.append(Columns(box.path, box.offset + (start - box.rows[0]) * nbytes, nbytes))
        if len(blocks) == 1:
            return Run(blocks[0].path, blocks[0].offset, (stop - start) * blocks[0].nbytes)
        return SideBySide(tuple(blocks), stop - start)


class WeightRows:
    """The rows of a weight in the files of a checkpoint. Raises UserError where they are not there once each."""

    def __init__(self, source: CheckpointWeights, weight: Weight):
        self.weight = weight
        self.dtype = source.dtype(weight)
        boxes = [box for spot in source.spots(weight) for box in _boxes(source, weight, spot)]
        self._bands = tuple(_bands(source, weight, boxes))
        self._checks = tuple(dict.fromkeys(box.check for box in boxes if box.check.crc32))
        # Files by whether the archives in them have checksums of their own.
        self.checked = frozenset(box.path for box in boxes if box.check.crc32)
        self.unchecked = frozenset(box.path for box in boxes if not box.check.crc32)
        self._starts = [band.rows[0] for band in self._bands]

    def part(self, index: int, dtype: torch.dtype) -> tuple[Segment, ...]:
        """The bytes of one of the weight's Hugging Face tensors (or of the row of one), as this type.

        The first part checks the pieces that all of them are made of.
        """
        checks: tuple[Segment, ...] = self._checks if index == 0 else ()
        rows = self.weight.shape[0]
        if view := _view(self.weight.form, self.weight.shape):
            segments: Iterator[Segment] = iter((Viewed(tuple(self._rows(0, rows)), self.dtype.itemsize, *view),))
        else:
            numbers = self.weight.form.split(torch.arange(rows))[index]
            segments = itertools.chain.from_iterable(self._rows(start, stop) for start, stop in _runs(numbers))
        if dtype == self.dtype:
            return (*checks, *segments)
        types = (str(self.dtype).removeprefix("torch."), str(dtype).removeprefix("torch."))
        return (*checks, *(Cast(segment, *types, self.weight.parts[index].tensor) for segment in segments))

    def _rows(self, start: int, stop: int) -> Iterator[Segment]:
        for band in self._bands[bisect_right(self._starts, start) - 1 :]:
            if band.rows[0] >= stop:
                break
            yield band.segment(max(start, band.rows[0]), min(stop, band.rows[1]), self.dtype.itemsize)


def _runs(numbers: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Runs (start, stop) of consecutive numbers."""
    breaks = (torch.nonzero(numbers.diff() != 1).flatten() + 1).tolist()
    for low, high in itertools.pairwise([0, *breaks, len(numbers)]):
        yield int(numbers[low]), int(numbers[high - 1]) + 1


def _view(form: Form, shape: Shape) -> tuple[Shape, Shape] | None:
    """Shape and strides of what `form.split` makes of a weight of this shape, where that is not a choice of rows."""
    rows, rest = shape[0], shape[1:]
    columns = rest[0] if rest else 1
    if isinstance(form, InterleavedGateUp):
        return (*rest, rows // 2, 2), (*(1,) * len(rest), columns, rows // 2 * columns)
    if isinstance(form, TransposedRows):
        return (columns, rows), (1, columns)
    return None


def _bands(source: CheckpointWeights, weight: Weight, boxes: Sequence[Box]) -> Iterator[Band]:
    rows, *rest = weight.shape
    columns = rest[0] if rest else 1
    edges = sorted({0, rows, *(edge for box in boxes for edge in box.rows)})
    boxes = sorted(boxes, key=lambda box: box.columns)
    for start, stop in itertools.pairwise(edges):
        row = tuple(box for box in boxes if box.rows[0] <= start and stop <= box.rows[1])
        ends = [0, *(box.columns[1] for box in row)]
        if ends[-1] != columns or any(box.columns[0] != end for box, end in zip(row, ends)):
            raise UserError(
                f"{source.folder.path}: rows {start} to {stop} of {weight.name} are not there once; the checkpoint is "
                "not whole, save or copy it again"
            )
        yield Band((start, stop), row)


def _boxes(source: CheckpointWeights, weight: Weight, spot: Spot) -> Iterator[Box]:
    """The pieces that hold something of a spot, cut to the rows of it."""
    axes, dims = len(spot.index), len(weight.shape)
    rows = spot.rows[1] - spot.rows[0]
    for piece in spot.stored.at(spot.index):
        low, size = piece.offsets[axes:], piece.sizes[axes:]
        if low[0] >= rows or not all(size):
            continue
        payload, crc32 = source.folder.payload(spot.stored, piece)
        path, itemsize = str(source.folder.path / piece.file), spot.stored.dtype.itemsize
        width = size[1] if dims > 1 else 1
        before = _flat(tuple(a - b for a, b in zip(spot.index, piece.offsets)), piece.sizes[:axes])
        left = low[1] if dims > 1 else 0
        yield Box(
            rows=(spot.rows[0] + low[0], spot.rows[0] + min(low[0] + size[0], rows)),
            columns=(left, left + width),
            path=path,
            offset=payload + before * size[0] * width * itemsize,
            check=Intact(path, payload, math.prod(piece.sizes) * itemsize, crc32),
        )


def _flat(index: Sequence[int], sizes: Sequence[int]) -> int:
    number = 0
    for at, size in zip(index, sizes):
        number = number * size + at
    return number
