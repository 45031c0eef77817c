"""Splitting a packed row over the ranks that share it: zigzag over the ring, in order over Ulysses.

Each document is cut into 2P chunks for a ring of P ranks; rank r has chunks r and 2P-1-r, so that all have the same
share of the causal triangle. What the ring rank has, its Ulysses ranks hold in order, one slice each. Documents are not
padded: the tokens that 2P does not divide go to the ranks in turn, over the whole row, so that every rank has the same
number of tokens as soon as P divides the row.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.collectives import sum_over_ranks
from isoloss.parallel.mesh import Mesh


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
