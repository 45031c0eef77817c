"""The contents of a conversion's weight files: tensors of one format, made of tensors of the other.

The forms of the weight map make them, some rows at a time: what is in memory as a whole are tensors that a form
transposes, and no others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from isoloss.models.kinds.mappings import InterleavedGatedMLP, TransposedRowParallel
from isoloss.models.kinds.weight import Weight
from isoloss.models.weights.checkpoint_read import CheckpointWeights
from isoloss.models.weights.finite import check_finite, is_finite
from isoloss.models.weights.mmap import fetch
from isoloss.parallel.runtime.errors import UserError

BLOCK_BYTES = 4 << 20
# All other mappings choose rows, given by the rows' numbers.
_TRANSPOSING = (InterleavedGatedMLP, TransposedRowParallel)
_NEXT_PART = 1 << 40


@dataclass(frozen=True)
class MergedRows:
    """Rows [start, stop) of a Megatron-Core weight; rows beyond the weight's own are zeros.

    paths, views: files of the weight's parts, and views of the parts in mapped files.
    """

    weight: Weight
    start: int
    stop: int
    dtype: torch.dtype
    paths: tuple[Path, ...]
    views: tuple[Tensor, ...] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * prod(self.weight.shape[1:]) * self.dtype.itemsize

    def blocks(self) -> Iterator[Tensor]:
        rows, *rest = self.weight.shape
        for k, block in self._blocks():
            yield _cast(block, self.dtype, self.weight.parts[k].tensor, self.paths[k])
        if self.stop > rows:
            yield torch.zeros((self.stop - max(self.start, rows), *rest), dtype=self.dtype)

    def _blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield blocks of rows, each with the number of a part that it is made of."""
        mapping = self.weight.mapping
        if isinstance(mapping, _TRANSPOSING):
            yield 0, mapping.merge([fetch(*part) for part in zip(self.views, self.paths)])[self.start : self.stop]
            return
        numbers = mapping.merge([torch.arange(len(part)) + k * _NEXT_PART for k, part in enumerate(self.views)])
        for first, size in _runs(numbers[self.start : self.stop], self.views[0][0].nbytes):
            k, row = divmod(first, _NEXT_PART)
            yield k, fetch(self.views[k][row : row + size], self.paths[k])


@dataclass(frozen=True)
class SplitPart:
    """The Hugging Face tensor (or the row of one) that is part number `index` of a weight of a checkpoint."""

    weight: Weight
    index: int
    dtype: torch.dtype
    source: CheckpointWeights = field(repr=False)

    @property
    def nbytes(self) -> int:
        return prod(self.weight.parts[self.index].shape) * self.dtype.itemsize

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        return self.source.paths(self.weight)

    def blocks(self) -> Iterator[Tensor]:
        for block in self._blocks():
            yield _cast(block, self.dtype, self.weight.parts[self.index].tensor, self.paths[0])

    def _blocks(self) -> Iterator[Tensor]:
        mapping = self.weight.mapping
        if isinstance(mapping, _TRANSPOSING):
            yield mapping.split(self.source.whole(self.weight))[self.index]
            return
        numbers = mapping.split(torch.arange(self.weight.shape[0]))[self.index]
        row_bytes = prod(self.weight.shape[1:]) * self.source.dtype(self.weight).itemsize
        for first, size in _runs(numbers, row_bytes):
            yield self.source.rows(self.weight, first, first + size)


@dataclass(frozen=True)
class KeptTensor:
    """A tensor of a Hugging Face file as it is, which is no weight of the model. view: of the mapped file `path`."""

    name: str
    path: Path
    view: Tensor = field(repr=False)

    @property
    def nbytes(self) -> int:
        return self.view.nbytes

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.path,)

    def blocks(self) -> Iterator[Tensor]:
        for block in self.view.flatten().split(max(1, BLOCK_BYTES // self.view.itemsize)):
            yield fetch(block, self.path)


@dataclass(frozen=True)
class Update:
    """A product of two thin factors, for a matrix [rows, columns]: scale * left [rows, r] right [r, columns]."""

    left: Tensor
    right: Tensor
    scale: float


@dataclass(frozen=True)
class UpdatedTensor:
    """A tensor of a Hugging Face file with products added: to a matrix, or to each of several.

    The sum is made in fp64 and rounded once, to the type of the file.

    view: view of the mapped file `path`, [rows, columns] or [matrices, rows, columns].
    origin: file of the factors.
    updates: products that each matrix gets.
    """

    name: str
    path: Path
    origin: Path
    view: Tensor = field(repr=False)
    updates: tuple[Update, ...] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return self.view.nbytes

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.path, self.origin

    def blocks(self) -> Iterator[Tensor]:
        matrices = self.view if self.view.ndim == 3 else self.view[None]
        for matrix, update in zip(matrices, self.updates, strict=True):
            left, right = (fetch(factor, self.origin).double() for factor in (update.left, update.right))
            step = max(1, BLOCK_BYTES // (matrix.shape[1] * torch.float64.itemsize))
            for rows, part in zip(matrix.split(step), left.split(step), strict=True):
                check_finite(fetch(rows, self.path), self.name, self.path)
                summed = torch.addmm(rows.double(), part, right, alpha=update.scale).to(matrix.dtype)
                if not is_finite(summed):
                    kind = str(matrix.dtype).removeprefix("torch.")
                    raise UserError(f"{self.name} with its adapter holds numbers too large for {kind}, its type")
                yield summed


def parts_of(weights: Sequence[Weight]) -> Mapping[str, Sequence[tuple[Weight, int]]]:
    """Hugging Face tensors in the order of the map, and what each consists of, row by row: a weight, and the number of
    its part. Raises ValueError where the map uses one not once, or a weight is not as large as its parts."""
    found: dict[str, list[tuple[Weight, int]]] = {}
    for weight in weights:
        if sum(prod(part.shape) for part in weight.parts) != prod(weight.shape):
            raise ValueError(f"{weight.name} is not as large as its parts")
        for index, part in enumerate(weight.parts):
            found.setdefault(part.tensor, []).append((weight, index))
    for name, members in found.items():
        parts = [weight.parts[index] for weight, index in members]
        if [part.row or 0 for part in parts] != list(range(parts[0].rows or 1)):
            raise ValueError(f"{name} would not be used once, in its order: {parts}")
    return found


def _runs(numbers: Tensor, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers: the first, and how many, of rows that make about BLOCK_BYTES."""
    step = max(1, BLOCK_BYTES // row_bytes)
    ends = [0, *(torch.nonzero(numbers.diff() != 1).flatten() + 1).tolist(), len(numbers)]
    for low, high in pairwise(ends):
        for at in range(low, high, step):
            yield int(numbers[at]), min(step, high - at)


def _cast(block: Tensor, dtype: torch.dtype, tensor: str, path: Path) -> Tensor:
    check_finite(block, tensor, path)
    cast = block.to(dtype)
    if cast is not block and not is_finite(cast):
        kind = str(dtype).removeprefix("torch.")
        raise UserError(f"{tensor} in {path} holds numbers too large for {kind}; choose another --dtype")
    return cast
