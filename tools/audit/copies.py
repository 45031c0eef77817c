"""Find rows that repeat another one, exactly or nearly.

Exact copies have the same tokens. Near copies have sets of shingles, of SHINGLE tokens in a row, whose Jaccard
similarity is at least SIMILAR. Candidates come from MinHash (Broder 1997, "On the resemblance and containment of
documents") in bands (Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", section 3.4): of two rows of similarity
s one band of ROWS hashes agrees with probability 1 - (1 - s**ROWS)**BANDS, 0.998 at 0.8. The sets of each candidate are
then compared, so a row that is reported is one. Shingles of over a tenth of the rows, such as those of a system prompt,
are not counted: they are the form of the data.

Memory: 4 * HASHES bytes a row. No collective, no randomness: the same rows give the same copies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from isoloss.engine.data.remarks import digest
from isoloss.parallel.runtime.console import Progress

SHINGLE, SIMILAR = 5, 0.8
BANDS, ROWS = 12, 4
HASHES = BANDS * ROWS
DOUBT = 0.15  # a candidate whose hashes say less than SIMILAR - DOUBT is not compared
COMPARED = 8  # candidates that a row is compared with at most, as in synthetic data all rows may be somewhat alike
SAMPLED, FEWEST = 4096, 20  # rows in which common shingles are looked for; rows that a common shingle is in at least
BLOCK = 1 << 18  # tokens at a time, which fit a cache of the processor
BITS = 20
_RANDOM = np.random.default_rng(0)
FACTORS = _RANDOM.integers(0, 2**32, HASHES, np.uint32) | np.uint32(1)
SHIFTS = _RANDOM.integers(0, 2**32, HASHES, np.uint32)
PRIME, MIX = np.uint64(0x100000001B3), np.uint64(0xBF58476D1CE4E5B9)
NOTHING = np.uint32(2**32 - 1)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Rows as tokens. tokens: int32 [total]. offsets: int64 [n + 1]; row i is offsets[i]:offsets[i + 1]."""

    tokens: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1


def exact_copies(rows: Tokens, of: Tokens | None = None) -> np.ndarray:
    """Return for each row the first row of `of` with the same tokens, or -1; without `of` the first earlier row.
    int64 [n]."""
    known: dict[bytes, int] = {}
    for index, key in enumerate(_digests(of) if of is not None else ()):
        known.setdefault(key, index)
    found = np.full(len(rows), -1, np.int64)
    for index, key in enumerate(_digests(rows)):
        found[index] = known.get(key, -1) if of is not None else known.setdefault(key, index)
    return found if of is not None else np.where(found == np.arange(len(rows)), -1, found)


def _digests(rows: Tokens) -> Iterator[bytes]:
    bounds = rows.offsets.tolist()
    return (digest(rows.tokens[start:end]) for start, end in pairwise(bounds))


class Sketches:
    """The MinHash signatures of rows. common: shingles that are not counted; None: those of over a tenth of the rows.

    signatures: uint32 [n, HASHES].
    """

    def __init__(self, rows: Tokens, what: str, common: np.ndarray | None = None):
        self._rows = rows
        self.common = self._find_common() if common is None else common
        self._may_be_common = np.zeros(1 << BITS, bool)
        self._may_be_common[self.common & np.uint64((1 << BITS) - 1)] = True
        self.signatures = np.empty((len(rows), HASHES), np.uint32)
        progress = Progress("comparing", what, lambda: len(rows))
        for first, last in self._blocks():
            self.signatures[first:last] = self._signatures(first, last)
            progress.advance(last - first)

    def similarity(self, row: int, of: "Sketches", other: int) -> float:
        """Return the Jaccard similarity of a row and another one."""
        mine, others = self._shingles(row), of._shingles(other)
        both = len(np.intersect1d(mine, others, assume_unique=True))
        return both / max(1, len(mine) + len(others) - both)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Yield [first, last) of consecutive rows with about BLOCK tokens."""
        first, offsets = 0, self._rows.offsets
        while first < len(self._rows):
            last = int(np.searchsorted(offsets, offsets[first] + BLOCK))
            last = min(max(last, first + 1), len(self._rows))
            yield first, last
            first = last

    def _find_common(self) -> np.ndarray:
        count = min(len(self._rows), SAMPLED)
        sample = np.linspace(0, len(self._rows) - 1, count).astype(np.int64) if count else ()
        sets = [np.unique(shingle_hashes(self._rows, i, i + 1)[0]) for i in sample]
        hashes, rows = np.unique(np.concatenate(sets), return_counts=True) if sets else (np.zeros(0, np.uint64), 0)
        return hashes[rows > max(FEWEST, count / 10)]

    def _is_common(self, hashes: np.ndarray) -> np.ndarray:
        found = self._may_be_common[hashes & np.uint64((1 << BITS) - 1)]
        found[found] = np.isin(hashes[found], self.common)
        return found

    def _shingles(self, row: int) -> np.ndarray:
        hashes = np.unique(shingle_hashes(self._rows, row, row + 1)[0])
        return hashes[~self._is_common(hashes)]

    def _signatures(self, first: int, last: int) -> np.ndarray:
        hashes, starts = shingle_hashes(self._rows, first, last)
        uncounted = np.where(self._is_common(hashes), NOTHING, np.uint32(0))
        low = (hashes >> np.uint64(32)).astype(np.uint32)
        columns = [
            np.minimum.reduceat((low * factor + shift) | uncounted, starts) for factor, shift in zip(FACTORS, SHIFTS)
        ]
        return np.stack(columns, axis=1)


def shingle_hashes(rows: Tokens, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of the shingles of rows [first, last), uint64, and the index of each row's first one.

    A row of fewer than SHINGLE tokens has one shingle, of all its tokens.
    """
    bounds = rows.offsets[first : last + 1] - rows.offsets[first]
    tokens = rows.tokens[rows.offsets[first] : rows.offsets[last]].astype(np.uint64) + np.uint64(1)
    lengths = np.diff(bounds)
    left = np.repeat(bounds[1:], lengths) - np.arange(len(tokens))  # tokens to the end of the row, from each
    hashes = np.zeros(len(tokens), np.uint64)
    for ahead in range(SHINGLE):
        hashes *= PRIME
        reach = max(0, len(tokens) - ahead)
        hashes[:reach] += tokens[ahead:] * (left[:reach] > ahead)
    hashes ^= hashes >> np.uint64(31)
    hashes *= MIX
    hashes ^= hashes >> np.uint64(29)
    hashes *= PRIME
    whole = left >= SHINGLE
    whole[bounds[:-1]] = True
    starts = np.concatenate([[0], np.cumsum(np.maximum(1, lengths - SHINGLE + 1))[:-1]])
    return hashes[whole], starts


def near_copies(rows: Sketches, counted: np.ndarray, of: Sketches | None = None) -> np.ndarray:
    """Return for each row a row of `of` that is at least SIMILAR, or -1; without `of` an earlier row. int64 [n].

    counted: bool [n], rows that may be near copies; without `of`, also of which others may be.
    """
    found, compared = np.full(len(counted), -1, np.int64), np.zeros(len(counted), np.int64)
    # A row of common shingles alone is like any other such row.
    counted = counted & (rows.signatures != NOTHING).any(axis=1)
    tried: set[tuple[int, int]] = set()
    for band in range(BANDS):
        keys = _keys(rows.signatures, band)
        pairs = _earlier(keys, counted) if of is None else _others(keys, counted, _keys(of.signatures, band))
        other_rows = of or rows
        for mine, others in pairs:
            open_ = (found[mine] < 0) & (compared[mine] < COMPARED)
            mine, others = mine[open_], others[open_]
            alike = (rows.signatures[mine] == other_rows.signatures[others]).mean(axis=1) >= SIMILAR - DOUBT
            for row, other in zip(mine[alike].tolist(), others[alike].tolist()):
                if (row, other) not in tried:
                    tried.add((row, other))
                    compared[row] += 1
                    if found[row] < 0 and rows.similarity(row, other_rows, other) >= SIMILAR:
                        found[row] = other
    return found


def _keys(signatures: np.ndarray, band: int) -> np.ndarray:
    """Return a hash of the band of each signature, uint64 [n]."""
    keys = np.zeros(len(signatures), np.uint64)
    for column in signatures[:, band * ROWS : (band + 1) * ROWS].T:
        keys = (keys ^ column) * MIX
        keys ^= keys >> np.uint64(32)
    return keys


def _earlier(keys: np.ndarray, counted: np.ndarray) -> Sequence[tuple[np.ndarray, np.ndarray]]:
    """Return pairs of rows with the same key: each with the first of them, and with the last one before it."""
    rows = np.flatnonzero(counted)
    rows = rows[np.argsort(keys[rows], kind="stable")]
    same = np.concatenate([[False], keys[rows][1:] == keys[rows][:-1]]) if len(rows) else np.zeros(0, bool)
    first = np.maximum.accumulate(np.where(same, 0, np.arange(len(rows))))
    later = np.flatnonzero(same)
    return (rows[later], rows[first[later]]), (rows[later], rows[later - 1])


def _others(keys: np.ndarray, counted: np.ndarray, of_keys: np.ndarray) -> Sequence[tuple[np.ndarray, np.ndarray]]:
    """Return pairs of a row and another one with its key: with the first of these, and the last."""
    order = np.argsort(of_keys, kind="stable")
    rows = np.flatnonzero(counted)
    begin, end = (np.searchsorted(of_keys[order], keys[rows], side) for side in ("left", "right"))
    rows, begin, end = rows[end > begin], begin[end > begin], end[end > begin]
    return (rows, order[begin]), (rows, order[end - 1])
