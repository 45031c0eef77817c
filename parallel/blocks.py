"""Which queries of one ring rank see which keys of another, document by document."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from isoloss.parallel.sequence import chunk_borders


@dataclass(frozen=True)
class Block:
    """Queries and keys of one document, as slices of what their ranks hold, and which pairs see each other.

    Both are aligned at their ends, as FlashAttention does it: query i of I sees key j of J where
    -left <= (j - J) - (i - I) <= right. None: no limit on that side. Every query sees some key.
    """

    queries: slice
    keys: slice
    left: int | None = None
    right: int | None = None


@lru_cache(maxsize=256)
def blocks_of(lengths: tuple[int, ...], ring: int, rank: int, owner: int, window: int | None) -> tuple[Block, ...]:
    """What the queries of ring rank `rank` see of the keys of rank `owner`, where documents are cut as by `tokens_of`.

    A rank's two chunks of a document lie symmetrically to its middle. So both see the front chunk, and no more, of an
    owner further outside; of one further inside only the back chunk sees anything, and all of it.
    """
    window = None if window is None or window >= max(lengths) else window
    visible: list[Block] = []
    queries_at = keys_at = 0
    for border in chunk_borders(lengths, ring):
        queries = _pieces(border, rank, queries_at)
        keys = _pieces(border, owner, keys_at)
        queries_at, keys_at = queries[1].stop, keys[1].stop
        all_queries, all_keys = (slice(front.start, back.stop) for front, back in (queries, keys))
        if ring == 1 or (window is None and rank == owner):
            visible.append(Block(all_queries, all_keys, None if window is None else window - 1, right=0))
        elif window is not None:
            visible += _windowed(border, rank, owner, queries, keys, window)
        elif owner < rank:
            visible.append(Block(all_queries, keys[0]))
        else:
            visible.append(Block(queries[1], all_keys))
    return tuple(block for block in visible if size_of(block.queries) and size_of(block.keys))


def size_of(piece: slice) -> int:
    return piece.stop - piece.start


def _pieces(border: Sequence[int], rank: int, start: int) -> tuple[slice, slice]:
    """Where a rank that holds `start` tokens before this document holds its front and its back chunk."""
    mirror = len(border) - 2 - rank
    middle = start + border[rank + 1] - border[rank]
    return slice(start, middle), slice(middle, middle + border[mirror + 1] - border[mirror])


def _windowed(border: Sequence[int], rank: int, owner: int, queries, keys, window: int) -> Iterator[Block]:
    """The pairs of chunks of a document of which some query sees some key, without the tokens that see nothing."""
    mirror = len(border) - 2
    for query_chunk, query in zip((rank, mirror - rank), queries):
        for key_chunk, key in zip((owner, mirror - owner), keys):
            if query_chunk == key_chunk:
                yield Block(query, key, window - 1, right=0)
                continue
            distance = border[query_chunk] - border[key_chunk]  # from the first key to the first query
            nearest = distance - size_of(key) + 1
            if distance < 0 or nearest >= window:
                continue
            first = max(0, distance - window + 1)  # the farthest key of the first query
            count = min(size_of(query), window - nearest)  # queries that see the last key
            left = window - 1 - distance + size_of(key) - count
            yield Block(slice(query.start, query.start + count), slice(key.start + first, key.stop), left)
