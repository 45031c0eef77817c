"""Give tokenized rows as a sequence of Samples."""

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from isoloss.engine.batching.sample import Sample
from isoloss.engine.data.bad_rows import Reject
from isoloss.engine.data.mixture import Mixture, order_of
from isoloss.engine.data.remarks import digest
from isoloss.engine.data.rows import place_of

ROWS = {"tokens": np.int32, "mask": np.bool_, "offsets": np.int64}
ARRAYS = ROWS | {"origins": np.int32}


@dataclass(frozen=True)
class DataStats:
    """Counts of a split that was tokenized.

    rows, tokens, targets: number of rows in the data set, and of their tokens and targets.
    dropped, truncated: number of rows longer than data.max_length.
    forms: rows in the data set by their columns.
    remarks: rows in the data set by key of `remarks.MESSAGES`.
    """

    rows: int
    dropped: int
    truncated: int
    tokens: int
    targets: int
    forms: Mapping[str, int] = field(default_factory=dict)
    remarks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """A sequence of Samples over arrays, with n sequences and `total` tokens in all.

    tokens: int32 [total].
    mask: bool [total], True at targets.
    offsets: int64 [n + 1]; sequence i is offsets[i]:offsets[i + 1].
    origins: int32 [n, 2]; for each sequence the index of its file in `paths`, and its line or row in it, from 1.
    fingerprint: a hash of tokens, mask and offsets, whatever files they were read from.
    rejects: bad rows that were left out.
    unused: columns that nothing was read from.
    turn_ends: ids of the tokens that end learned turns, by token.
    mixture: the sources that steps draw rows from by weights; None without weights.
    """

    tokens: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray
    origins: np.ndarray
    paths: tuple[str, ...]
    stats: DataStats
    fingerprint: str
    rejects: Sequence[Reject] = ()
    unused: Sequence[str] = ()
    turn_ends: Mapping[str, int] = field(default_factory=dict)
    mixture: Mixture | None = None

    @property
    def order(self) -> int | Mixture:
        """Return what `step_indices` draws from."""
        return order_of(len(self), self.mixture)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each sequence, int64 [n]."""
        return np.diff(self.offsets).astype(np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def digests(self) -> Iterator[bytes]:
        """Yield a hash of the tokens of each sequence."""
        for start, end in itertools.pairwise(self.offsets.tolist()):
            yield digest(self.tokens[start:end])

    def __getitem__(self, index: int) -> Sample:
        """Return sequence `index` with int64 tokens and bool mask, copied out of the memory map."""
        index = range(len(self))[index]  # negative indices, and IndexError past the end
        part = slice(self.offsets[index], self.offsets[index + 1])
        tokens_T = torch.from_numpy(self.tokens[part].astype(np.int64))
        file, number = self.origins[index].tolist()
        return Sample(tokens_T, torch.from_numpy(np.array(self.mask[part])), id=place_of(self.paths[file], number))


def fingerprint(arrays: Mapping[str, np.ndarray]) -> str:
    """Return a hash of the rows in the arrays of a TokenDataset: their order, tokens and targets."""
    digest = hashlib.sha256()
    for name, dtype in ROWS.items():
        digest.update(np.ascontiguousarray(arrays[name], np.dtype(dtype).newbyteorder("<")).data)
    return digest.hexdigest()[:16]
