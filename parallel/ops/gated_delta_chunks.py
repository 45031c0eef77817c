"""Chunks of the documents of a packed row, for a scan over the chunks of all documents in parallel, and the terms of
the gated delta rule that need no state.

Shape suffixes as in `gated_delta`.
"""

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from isoloss.parallel.ops.fused import precise
from isoloss.parallel.ops.varlen import VarlenCache

CHUNK = 64  # tokens
NORM_EPS = 1e-6  # of the norm of queries and keys, in every published model


class DeltaInputs(NamedTuple):
    """The tensors that the rule reads for each token.

    log_decay_TH: logarithm of the factor by which the state decays, at most 0.
    rate_TH: share of the value at the key that the new value replaces.
    """

    query_TKD: Tensor
    key_TKD: Tensor
    value_THU: Tensor
    log_decay_TH: Tensor
    rate_TH: Tensor


@dataclass(frozen=True)
class Chunks:
    """The chunks of a row's documents, ordered by the number of later chunks of their document, most first.

    So the chunks of one turn of the scan are adjacent, and so are all chunks that pass on a state.

    slots: place of each token in the concatenated chunks.
    tokens: token of each place; a place without one has the last token of the chunk's document.
    empty: True for places without a token.
    order: documents that have tokens, by number of chunks, most first; a document has the same position in every turn.
    ranks: position of each document that has tokens in `order`.
    turns: number of chunks of each turn of the scan, not decreasing. The first chunks of a turn continue the chunks of
        the turn before, in their order; the rest begin documents. The last turn has the last chunk of every document.
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
        """Count the chunks that another chunk continues, which are all but those of the last turn."""
        return self.count - (self.turns[-1] if self.turns else 0)


@lru_cache(maxsize=64)
def chunks_of(lengths: tuple[int, ...]) -> Chunks:
    """Cut documents into chunks, of which only the last of a document may have fewer than CHUNK tokens."""
    sizes = np.array([length for length in lengths if length], dtype=np.int64)
    chunks = (sizes + CHUNK - 1) // CHUNK
    order = np.argsort(-chunks, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    longest = int(chunks.max(initial=0))
    # Turn t has the chunks with longest - 1 - t later chunks, one of each document that has more chunks than that.
    turns = [int((chunks > longest - 1 - turn).sum()) for turn in range(longest)]
    first = np.array([0, *turns], dtype=np.int64).cumsum()
    document = np.arange(len(sizes)).repeat(sizes)
    position = np.arange(sizes.sum()) - (sizes.cumsum() - sizes)[document]
    turn = longest - chunks[document] + position // CHUNK
    slots = (first[turn] + rank[document]) * CHUNK + position % CHUNK
    tokens = np.full(first[-1] * CHUNK, -1)
    tokens[slots] = np.arange(len(slots))
    by_chunk = tokens.reshape(-1, CHUNK)
    filled = np.where(by_chunk < 0, by_chunk.max(1, keepdims=True, initial=0), by_chunk).reshape(-1)
    slots, filled, empty, order, rank = map(torch.from_numpy, (slots, filled, tokens < 0, order, rank))
    return Chunks(slots, filled, empty, order, rank, tuple(turns))


def chunks_on(lengths: tuple[int, ...], device: torch.device, uploads: VarlenCache | None, ordered: bool) -> Chunks:
    """Return the chunks with tensors on the device, uploaded once. ordered: True to upload `order` and `ranks` too."""
    chunks = chunks_of(lengths)
    if device.type == "cpu":
        return chunks
    uploads = uploads or VarlenCache()

    def on_device(name: str) -> Tensor:
        return uploads.once((name, lengths), partial(getattr, chunks, name), device)

    order, ranks = (on_device("order"), on_device("ranks")) if ordered else (chunks.order, chunks.ranks)
    return Chunks(on_device("slots"), on_device("tokens"), on_device("empty"), order, ranks, chunks.turns)


@dataclass(frozen=True)
class Turn:
    """The chunks of a block in one turn of the scan: first those that continue a document, then those that begin one.

    chunks, later, first: slices of the block: all chunks of the turn, those that continue, and those that begin.
    before: chunks that the `later` ones continue, as a slice of the row; None: no chunk continues.
    begun: documents that the `first` ones begin, as a slice of `Chunks.order`.
    followers: chunks that continue these, as a slice of the row; in the last turn a slice after the end of the row, in
        the order of the documents.
    """

    chunks: slice
    later: slice
    first: slice
    before: slice | None
    begun: slice
    followers: slice


@dataclass(frozen=True)
class Block:
    """The chunks `start` to `stop` of a row, with their turns of the scan."""

    start: int
    stop: int
    turns: tuple[Turn, ...]


@lru_cache(maxsize=64)
def blocks_of(turns: tuple[int, ...], size: int) -> tuple[Block, ...]:
    """Cut the chunks of a row into blocks of at most `size`; a chunk continues one of its own or an earlier block."""
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


class BlockTerms:
    """The chunks of a block, cut from the row, and all that they compute without a state.

    query, key: queries and keys, scaled to lengths D**-0.5 and 1, [N, K, C, D].
    past: decay exp(G_i - G_j) from token j to token i >= j, G being the sums of log decays, [N, H, C, C].
    similar, seen: products key_i . key_j and query_i . key_j for each key head, [N, K, C, C].
    since, until: decay from the start of the chunk to token i, and from token i to the end of the chunk, [N, H, C, 1].
    decay: decay over the whole chunk, [N, H, 1, 1].
    with_states: True if final states are asked for. Then places without a token must neither write nor decay.
    """

    def __init__(self, chunks: Chunks, block: Block, inputs: DeltaInputs, with_states: bool):
        self.with_states, self.chunks, self.turns, self.inputs = with_states, chunks, block.turns, inputs
        self.block = slice(block.start, block.stop)
        self.places = slice(block.start * CHUNK, block.stop * CHUNK)
        key_TKD = inputs.key_TKD
        self.dtype, self.keys, self.length = precise(inputs.query_TKD).dtype, key_TKD.shape[1], key_TKD.shape[2] ** -0.5
        self.query, self.query_factor = to_length(self.length, self.cut(inputs.query_TKD))
        self.key, self.key_factor = to_length(1, self.cut(key_TKD))
        self.empty = chunks.empty[self.places].view(-1, 1, CHUNK, 1)
        self.rate, log_decay = (self.cut(x[..., None]).contiguous() for x in (inputs.rate_TH, inputs.log_decay_TH))
        if with_states:
            self.rate.masked_fill_(self.empty, 0)
            log_decay.masked_fill_(self.empty, 0)

        total = log_decay.cumsum(2)
        # Above the diagonal, differences are positive and belong to the future.
        self.past = _decay(total - total.transpose(2, 3)).tril_()
        self.since, self.until = _decay(total.clone()), _decay(total[:, :, -1:] - total)
        self.decay = self.since[:, :, -1:]
        transposed = self.key.transpose(2, 3)
        self.similar, self.seen = self.key @ transposed, self.query @ transposed

    def cut(self, x: Tensor) -> Tensor:
        """Gather the tokens of the chunks, [T, heads, width] -> [N, heads, C, width]; a place without a token has the
        last token of its document."""
        places = x.index_select(0, self.chunks.tokens[self.places]).to(self.dtype)
        return places.unflatten(0, (-1, CHUNK)).transpose(1, 2)

    def put(self, x: Tensor, into: Tensor) -> None:
        """Write [N, heads, C, width] to the places of these chunks in [places, heads, width]."""
        into[self.places].unflatten(0, (-1, CHUNK)).transpose(1, 2).copy_(x)

    def by_head(self, x_NK: Tensor, factor_NH: Tensor) -> Tensor:
        """Multiply a tensor of the key heads with a factor of each value head, [N, H, ...]."""
        return (x_NK[:, :, None] * factor_NH.unflatten(1, (self.keys, -1))).flatten(1, 2)

    def sum_by_key_head(self, x_NH: Tensor) -> Tensor:
        """Sum over the value heads of each key head, [N, K, ...]."""
        return x_NH if x_NH.shape[1] == self.keys else x_NH.unflatten(1, (self.keys, -1)).sum(2)


def _decay(log_decay: Tensor) -> Tensor:
    """Compute exp in place, flushed to 0 far below the rounding of the sums that it enters.

    Products with such factors are near underflow, and a CPU is several times slower on numbers near underflow.
    """
    least = torch.finfo(log_decay.dtype).eps ** 3
    return torch.threshold_(log_decay.clamp_(math.log(least) - 1, 0).exp_(), least, 0)


def to_length(length: float, x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale vectors to a length; return them without gaps, and their factors."""
    factor = length * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
    return scaled(x, factor), factor


def to_length_backward(length: float, grad: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    along = dot(grad, x) / length**2
    return grad.addcmul_(x, along, value=-1).mul_(factor)


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Return x * factor as contiguous memory."""
    return torch.mul(x, factor, out=x.new_empty(x.shape))


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute into = a @ b for all chunks and heads."""
    torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out=into.flatten(0, 1))


def add_product(into: Tensor, a: Tensor, b: Tensor, factor: float = 1) -> None:
    """Compute into += factor * a @ b for all chunks and heads."""
    if into.shape[0]:
        flat = into.flatten(0, 1)
        torch.baddbmm(flat, a.flatten(0, 1), b.flatten(0, 1), alpha=factor, out=flat)
