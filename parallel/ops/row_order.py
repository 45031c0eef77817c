"""The tokens of a packed row on each rank of a ring x Ulysses grid (the rule is in isoloss.parallel.sequence), and
permutations of rows."""

from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor


@lru_cache(maxsize=256)
def chunk_borders(lengths: tuple[int, ...], ring: int) -> tuple[tuple[int, ...], ...]:
    """Return the 2 * ring + 1 borders of the 2 * ring chunks of each document, as offsets in the document."""
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
    """Return the tokens of a rank of the grid as indices into the whole row, int64, in the rank's order.

    lengths: tokens of each document of the row; the sum is a multiple of ring * ulysses.
    """
    total = sum(lengths)
    assert total % (ring * ulysses) == 0, f"a row of {total} tokens over ring {ring} x ulysses {ulysses}"
    pieces, start = [], 0
    for length, border in zip(lengths, chunk_borders(lengths, ring)):
        for chunk in (ring_rank, 2 * ring - 1 - ring_rank):
            pieces.append(torch.arange(start + border[chunk], start + border[chunk + 1]))
        start += length
    return torch.cat(pieces).chunk(ulysses)[ulysses_rank]


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
    """Return x_TX[order_T] for a permutation and its inverse.

    The gradient of general indexing is a sum in an undefined order; for a permutation it is an index by the inverse.
    """
    return _Reorder.apply(x_TX, order_T, inverse_T)
