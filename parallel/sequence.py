"""Splitting a packed row over the ranks that share it: zigzag over the ring, in order over Ulysses.

Each document is cut into 2P chunks for a ring of P ranks; rank r has chunks r and 2P-1-r, so that all have the same
share of the causal triangle. What the ring rank has, its Ulysses ranks hold in order, one slice each. Documents are not
padded: the tokens that 2P does not divide go to the ranks in turn, over the whole row, so that every rank has the same
number of tokens as soon as P divides the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.collectives import sum_over_ranks
from isoloss.parallel.mesh import Mesh


@dataclass(frozen=True)
class Forest:
    """A packed row as pieces of documents, depth first. Documents that begin alike share the piece that they begin
    with: a document is a way from a root to a leaf, and positions go on along it.

    lengths: tokens of each piece; each is cut over the ring as a document is.
    parents: the piece that each goes on from, -1: it begins a document. Left out: every piece is a document.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...] = ()

    def __post_init__(self):
        assert not self.parents or len(self.parents) == len(self.lengths)
        path: list[int] = []  # from a root to the piece before
        for piece, parent in enumerate(self.parents):
            while path and path[-1] != parent:
                path.pop()
            assert path or parent == -1, f"piece {piece} is not depth first: {self.parents}"
            path.append(piece)

    @property
    def shares(self) -> bool:
        """Whether some piece belongs to several documents, or might."""
        return any(parent >= 0 for parent in self.parents)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The position of the first token of each piece."""
        offsets: list[int] = []
        for parent in self.parents or (-1,) * len(self.lengths):
            offsets.append(offsets[parent] + self.lengths[parent] if parent >= 0 else 0)
        return tuple(offsets)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How many pieces come before each in its documents."""
        depths: list[int] = []
        for parent in self.parents or (-1,) * len(self.lengths):
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return tuple(depths)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The first piece behind all that go on from each: those between are its descendants."""
        ends = list(range(1, len(self.lengths) + 1))
        for piece, parent in reversed(list(enumerate(self.parents))):
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[piece])
        return tuple(ends)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(map(sum, zip(self.offsets, self.lengths)), default=0)


def padded_length(tokens: int, mesh: Mesh) -> int:
    """The length of a packed row of `tokens` tokens: the next multiple that splits evenly over the context ranks."""
    multiple = mesh.row_multiple
    return max(-(-tokens // multiple), 1) * multiple


def padded_document(tokens: int, mesh: Mesh) -> int:
    """The room that a document of `tokens` tokens takes in a packed row."""
    return -(-tokens // mesh.document_multiple) * mesh.document_multiple


def row_length(lengths: Sequence[int], mesh: Mesh) -> int:
    """Of a whole packed row of documents of these lengths, with all padding."""
    return padded_length(sum(padded_document(length, mesh) for length in lengths), mesh)


@lru_cache(maxsize=256)
def chunk_borders(lengths: tuple[int, ...], ring: int) -> tuple[tuple[int, ...], ...]:
    """Where the 2 * ring chunks of each document begin and end, counted within the document: 2 * ring + 1 numbers."""
    borders, turn = [], 0
    for length in lengths:
        size, left = divmod(length, 2 * ring)
        sizes = [size] * (2 * ring)
        for extra in range(left):
            rank = (turn + extra) % ring
            sizes[rank if extra < ring else 2 * ring - 1 - rank] += 1  # the second one of a rank goes to its back chunk
        turn = (turn + left) % ring
        borders.append((0, *accumulate(sizes)))
    return tuple(borders)


def tokens_of(lengths: tuple[int, ...], ring: int, ring_rank: int, ulysses: int = 1, ulysses_rank: int = 0) -> Tensor:
    """Which tokens of a whole row a rank of the grid holds: indices into the row, int64, in the order it holds them.

    lengths: of the documents of the row; they add up to a multiple of ring * ulysses.
    """
    total = sum(lengths)
    assert total % (ring * ulysses) == 0, f"a row of {total} tokens over ring {ring} x ulysses {ulysses}"
    pieces, start = [], 0
    for length, border in zip(lengths, chunk_borders(lengths, ring)):
        for chunk in (ring_rank, 2 * ring - 1 - ring_rank):
            pieces.append(torch.arange(start + border[chunk], start + border[chunk + 1]))
        start += length
    return torch.cat(pieces).chunk(ulysses)[ulysses_rank]


def own_tokens(lengths: tuple[int, ...], mesh: Mesh) -> Tensor:
    """`tokens_of` this rank. Whole rows are sharded after targets were shifted: no rank needs a neighbour's token.

    Transformer Engine's kernels want one zigzag over all context ranks, whoever of them exchanges heads.
    """
    if mesh.cp_kernel != "isoloss":
        return tokens_of(lengths, mesh.context.size(), mesh.context.rank())
    return tokens_of(lengths, mesh.ring.size(), mesh.ring.rank(), mesh.ulysses.size(), mesh.ulysses.rank())


def sum_over_documents(values_N: Tensor, document_N: Tensor, num_documents: int, group: dist.ProcessGroup) -> Tensor:
    """Sums of per-token values over whole documents whose tokens lie on several ranks, [num_documents] on each.

    document_N: the document of every value. Differentiable; one all-reduce over `group` each way.
    """
    totals = values_N.new_zeros(num_documents).index_add(0, document_N, values_N)
    return sum_over_ranks(totals, group)


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def reordered(x_TX: Tensor, order_T: Tensor, inverse_T: Tensor) -> Tensor:
    """x_TX[order_T]. The gradient of an index adds up, in an order of its own; a permutation has no need to."""
    return _Reorder.apply(x_TX, order_T, inverse_T)
