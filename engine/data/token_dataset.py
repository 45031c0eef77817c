"""Tokenized rows as a sequence of Samples."""

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch

from isoloss.engine.batching.sample import Sample
from isoloss.engine.data.bad_rows import Reject
from isoloss.engine.data.remarks import digest
from isoloss.engine.data.rows import place_of

ROWS = {"tokens": np.int32, "mask": np.bool_, "offsets": np.int64}
ARRAYS = ROWS | {"origins": np.int32}


@dataclass(frozen=True)
class DataStats:
    """rows: sequences kept; dropped, truncated: rows over max_length; tokens, targets: of the rows kept.

    forms: how many of them have which columns. remarks: how many deserve which of `remarks.TOLD`.
    """

    rows: int
    dropped: int
    truncated: int
    tokens: int
    targets: int
    forms: Mapping[str, int] = field(default_factory=dict)
    remarks: Mapping[str, int] = field(default_factory=dict)


class TokenDataset:
    """A sequence of Samples over arrays, with n sequences and `total` tokens in all.

    tokens: int32 [total].
    mask: bool [total], True at targets.
    offsets: int64 [n + 1], sequence i is offsets[i]:offsets[i + 1].
    origins: int32 [n, 2], which of the files `paths` a sequence comes from, from 0, and which line or row, from 1.
    fingerprint: the same for two data sets where tokens, mask and offsets are, whatever files they came from.
    rejects: bad rows that were left out.
    unused: columns that no row was read from.
    turn_ends: tokens, with their ids, that end what is learned.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        mask: np.ndarray,
        offsets: np.ndarray,
        origins: np.ndarray,
        paths: Sequence[str],
        stats: DataStats,
        fingerprint: str,
        rejects: Sequence[Reject] = (),
        unused: Sequence[str] = (),
        turn_ends: Mapping[str, int] = MappingProxyType({}),
    ):
        self.tokens, self.mask, self.offsets, self.stats = tokens, mask, offsets, stats
        self.origins, self.paths = origins, tuple(paths)
        self.fingerprint, self.rejects = fingerprint, tuple(rejects)
        self.unused, self.turn_ends = tuple(unused), dict(turn_ends)
        self.lengths: np.ndarray = np.diff(offsets).astype(np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def digests(self) -> Iterator[bytes]:
        """Of the tokens of each sequence."""
        for start, end in itertools.pairwise(self.offsets.tolist()):
            yield digest(self.tokens[start:end])

    def __getitem__(self, index: int) -> Sample:
        """Sequence `index` as int64 tokens and bool mask, copied out of the memory map."""
        index = range(len(self))[index]  # negative indices, and IndexError past the end
        part = slice(self.offsets[index], self.offsets[index + 1])
        tokens_T = torch.from_numpy(self.tokens[part].astype(np.int64))
        file, number = self.origins[index].tolist()
        return Sample(tokens_T, torch.from_numpy(np.array(self.mask[part])), id=place_of(self.paths[file], number))


def fingerprint(arrays: Mapping[str, np.ndarray]) -> str:
    """Of the rows that the arrays of a TokenDataset hold: their order, tokens and targets."""
    digest = hashlib.sha256()
    for name, dtype in ROWS.items():
        digest.update(np.ascontiguousarray(arrays[name], np.dtype(dtype).newbyteorder("<")).data)
    return digest.hexdigest()[:16]
