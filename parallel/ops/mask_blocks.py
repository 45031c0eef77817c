"""Compute which queries of one ring rank see which keys of another, as blocks of pieces of the documents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from isoloss.parallel.ops.prefix_tree import PrefixTree
from isoloss.parallel.ops.row_order import chunk_borders


@dataclass(frozen=True)
class Block:
    """Queries and keys of one document, and a mask of the pairs that see each other.

    Queries and keys are aligned at their ends, as in FlashAttention: query i of I sees key j of J where
    -left <= (j - J) - (i - I) <= right. Every query sees some key.

    queries, keys: slices of the tokens of their ranks.
    left, right: limits of the mask; None: no limit on this side.
    level: 0 within a piece, else 1 + the depth of the piece that has the keys. Without a window, a query is in at most
        one block of a level.
    """

    queries: slice
    keys: slice
    left: int | None = None
    right: int | None = None
    level: int = 0


@lru_cache(maxsize=256)
def blocks_of(forest: PrefixTree, ring: int, rank: int, owner: int, window: int | None) -> tuple[Block, ...]:
    """Return the blocks in which queries of ring rank `rank` see keys of rank `owner`; `tokens_of` cuts the pieces.

    The two chunks of a rank lie symmetrically about the middle of a piece, those of a lower rank further outside.
    Without a window, queries of both chunks see exactly the front chunk of a lower rank. Of a higher rank only queries
    of the back chunk see keys, and they see both chunks. Descendants of a piece see the whole piece.
    """
    window = None if window is None or window >= forest.longest else window
    borders = chunk_borders(forest.lengths, ring)
    queries, keys = _chunks(borders, rank), _chunks(borders, owner)
    visible: list[Block] = []
    for piece, (query, key) in enumerate(zip(queries, keys)):
        if window is not None:
            visible += _windowed(query, key, 0, window, 0)
        elif rank == owner:
            visible.append(Block(query.both, key.both, right=0))
        elif owner < rank:
            visible.append(Block(query.both, key.slices[0]))
        else:
            visible.append(Block(query.slices[1], key.both))
        later, level = range(piece + 1, forest.ends[piece]), 1 + forest.depths[piece]
        if window is None and later:
            visible.append(
                Block(slice(queries[later[0]].both.start, queries[later[-1]].both.stop), key.both, level=level)
            )
        elif window is not None:
            for other in later:
                apart = forest.offsets[other] - forest.offsets[piece]
                visible += _windowed(queries[other], key, apart, window, level)
    return tuple(block for block in visible if size_of(block.queries) and size_of(block.keys))


def size_of(piece: slice) -> int:
    return piece.stop - piece.start


@dataclass(frozen=True)
class _Chunks:
    """The front and the back chunk of a piece on a rank, or the whole piece in a ring of one rank.

    slices: slice of the rank's tokens for each chunk.
    starts: offset in the piece for each chunk.
    """

    slices: tuple[slice, ...]
    starts: tuple[int, ...]

    @property
    def both(self) -> slice:
        return slice(self.slices[0].start, self.slices[-1].stop)


def _chunks(borders: Sequence[Sequence[int]], rank: int) -> list[_Chunks]:
    chunks, at = [], 0
    for border in borders:
        mirror = len(border) - 2 - rank
        middle = at + border[rank + 1] - border[rank]
        end = middle + border[mirror + 1] - border[mirror]
        halves = (slice(at, middle), slice(middle, end)), (border[rank], border[mirror])
        chunks.append(_Chunks(*halves) if len(border) > 3 else _Chunks((slice(at, end),), (0,)))
        at = end
    return chunks


def _windowed(queries: _Chunks, keys: _Chunks, apart: int, window: int, level: int) -> Iterator[Block]:
    """Yield the pairs of chunks in which some query sees some key, cut to the tokens that see or are seen.

    apart: tokens from the first of the keys' piece to the first of the queries' piece; 0: both are one piece.
    """
    for query, query_at in zip(queries.slices, queries.starts):
        for key, key_at in zip(keys.slices, keys.starts):
            distance = apart + query_at - key_at  # from the first key to the first query
            if distance == 0:
                yield Block(query, key, window - 1, right=0)
                continue
            nearest = distance - size_of(key) + 1
            if distance < 0 or nearest >= window:
                continue
            first = max(0, distance - window + 1)  # the farthest key of the first query
            count = min(size_of(query), window - nearest)  # queries that see the last key
            left = window - 1 - distance + size_of(key) - count
            yield Block(slice(query.start, query.start + count), slice(key.start + first, key.stop), left, level=level)
