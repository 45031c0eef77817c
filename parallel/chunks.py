"""Chunks of the documents of a packed row, for a scan from chunk to chunk of each, all documents side by side."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from isoloss.parallel.ragged import Uploads

CHUNK = 64  # tokens


@dataclass(frozen=True)
class Chunks:
    """The chunks of a row's documents, those first that have the most chunks of their document behind them: so the
    chunks of one turn of the scan are neighbours, and so are all that hand a state on.

    slots: of each token, its place in the chunks, one chunk after the other. No token is in the other places.
    turns: chunks of each turn of the scan, not decreasing. The first chunks of a turn follow those of the turn before,
        in their order; the others are the first of their document.
    """

    slots: Tensor
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
    return Chunks(torch.from_numpy((first[turn] + rank[document]) * CHUNK + place % CHUNK), tuple(turns))


def chunks_on(lengths: tuple[int, ...], device: torch.device, uploads: Uploads | None) -> Chunks:
    chunks = chunks_of(lengths)
    if device.type == "cpu":
        return chunks
    uploads = uploads or Uploads()
    return Chunks(uploads.once(("slots", lengths), lambda: chunks.slots, device), chunks.turns)
