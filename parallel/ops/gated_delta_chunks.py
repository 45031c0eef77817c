"""Chunks of the documents of a packed row, for a scan from chunk to chunk of each, all documents side by side."""

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from isoloss.parallel.ops.varlen import VarlenCache

CHUNK = 64  # tokens


@dataclass(frozen=True)
class Chunks:
    """The chunks of a row's documents, those first that have the most chunks of their document behind them: so the
    chunks of one turn of the scan are neighbours, and so are all that hand a state on.

    slots: of each token, its place in the chunks, one chunk after the other.
    tokens: of each place, its token. empty: places without one, which have the last token of the chunk's document.
    order: the documents that have tokens, those with the most chunks first: a document's place among them, which is
        where its chunk is in every turn. ranks: of each document, that place.
    turns: chunks of each turn of the scan, not decreasing. The first chunks of a turn follow those of the turn before,
        in their order; the others are the first of their document. The last turn has the last of every document.
    """

    slots: Tensor
    tokens: Tensor
    empty: Tensor
    order: Tensor
    ranks: Tensor
    turns: tuple[int, ...]

    @property
    def count(self) -> int:
        return sum(self.turns)

    @property
    def with_successor(self) -> int:
        """All but those of the last turn."""
        return self.count - (self.turns[-1] if self.turns else 0)


@lru_cache(maxsize=64)
def chunks_of(lengths: tuple[int, ...]) -> Chunks:
    """The last chunk of a document is the one that is not full."""
    sizes = np.array([length for length in lengths if length], dtype=np.int64)
    chunks = (sizes + CHUNK - 1) // CHUNK
    order = np.argsort(-chunks, kind="stable")  # documents, those with the most chunks first
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    longest = int(chunks.max(initial=0))
    # Turn t has the chunks with longest - 1 - t behind them: those of as many documents as have more chunks than that.
    turns = [int((chunks > longest - 1 - turn).sum()) for turn in range(longest)]
    first = np.array([0, *turns], dtype=np.int64).cumsum()
    document = np.arange(len(sizes)).repeat(sizes)
    place = np.arange(sizes.sum()) - (sizes.cumsum() - sizes)[document]
    turn = longest - chunks[document] + place // CHUNK
    slots = (first[turn] + rank[document]) * CHUNK + place % CHUNK
    tokens = np.full(first[-1] * CHUNK, -1)
    tokens[slots] = np.arange(len(slots))
    by_chunk = tokens.reshape(-1, CHUNK)
    whole = np.where(by_chunk < 0, by_chunk.max(1, keepdims=True, initial=0), by_chunk).reshape(-1)
    slots, whole, empty, order, rank = map(torch.from_numpy, (slots, whole, tokens < 0, order, rank))
    return Chunks(slots, whole, empty, order, rank, tuple(turns))


def chunks_on(lengths: tuple[int, ...], device: torch.device, uploads: VarlenCache | None, ordered: bool) -> Chunks:
    """ordered: `order` and `ranks` are on the device, too."""
    chunks = chunks_of(lengths)
    if device.type == "cpu":
        return chunks
    uploads = uploads or VarlenCache()

    def there(name: str) -> Tensor:
        return uploads.once((name, lengths), partial(getattr, chunks, name), device)

    order, ranks = (there("order"), there("ranks")) if ordered else (chunks.order, chunks.ranks)
    return Chunks(there("slots"), there("tokens"), there("empty"), order, ranks, chunks.turns)


@dataclass(frozen=True)
class Turn:
    """The chunks of a block in one turn of the scan, as slices of the block: those that begin a document, first, come
    after those that do not, later. before: the chunks that the later ones follow, as a slice of the row; None where
    there are none. begun: the documents that begin, in `Chunks.order`. followers: the chunks that follow, as a slice of
    the row; behind its end, in the order of the documents, where these are the last."""

    chunks: slice
    later: slice
    first: slice
    before: slice | None
    begun: slice
    followers: slice


@dataclass(frozen=True)
class Block:
    """Some of a row's chunks, from one to another."""

    start: int
    stop: int
    turns: tuple[Turn, ...]


@lru_cache(maxsize=64)
def blocks_of(turns: tuple[int, ...], size: int) -> tuple[Block, ...]:
    """Blocks of at most `size` chunks. What a chunk follows is in its block, or in one before."""
    count, start, before = sum(turns), 0, 0
    parts: list[list[Turn]] = [[] for _ in range(0, count, size)]
    for chunks in turns:
        stop, middle = start + chunks, start + before
        cuts = [start, *range((start // size + 1) * size, stop, size), stop]
        for a, b in pairwise(cuts):
            border, origin = min(max(middle, a), b), a // size * size
            parts[a // size].append(
                Turn(
                    slice(a - origin, b - origin),
                    slice(a - origin, border - origin),
                    slice(border - origin, b - origin),
                    slice(a - before, border - before) if border > a else None,
                    slice(border - start, b - start),
                    slice(a + chunks, b + chunks),
                )
            )
        start, before = stop, chunks
    return tuple(
        Block(number * size, min((number + 1) * size, count), tuple(part)) for number, part in enumerate(parts)
    )
