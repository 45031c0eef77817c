"""Compute linear attention over a packed row whose documents share prefixes: a piece continues from the final state of
its parent, and its convolution sees the last tokens of the parent.

Shape suffixes: T tokens of the row, X channels, H value heads, U width of a value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from isoloss.parallel.ops.gated_delta_chunks import DeltaInputs
from isoloss.parallel.ops.prefix_tree import PrefixTree
from isoloss.parallel.ops.row_order import reordered
from isoloss.parallel.ops.varlen import VarlenCache


@dataclass(frozen=True)
class Level:
    """The pieces of one depth. lengths: tokens of each piece. parents: index of each piece's parent in the level above;
    empty in the first level."""

    lengths: tuple[int, ...]
    parents: Tensor

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Levels:
    """The levels of a row. order: [2, T], the tokens of the row by level, and the place of each token in this order."""

    order: Tensor
    levels: tuple[Level, ...]


@dataclass(frozen=True)
class Branches:
    """The first tokens of the pieces with a parent, whose windows begin before the piece.

    read: tokens of the row: for each such piece, the tokens before it within reach of a window, and its first tokens.
    lengths: tokens of `read` for each piece. own: places of first tokens in `read`. put: their places in the row.
    """

    read: Tensor
    lengths: tuple[int, ...]
    own: Tensor
    put: Tensor


def scan_forest(
    rule: Callable[..., Tensor],
    rule_and_states: Callable[..., tuple[Tensor, Tensor]],
    given: DeltaInputs,
    forest: PrefixTree,
    uploads: VarlenCache,
) -> Tensor:
    """Compute `delta_rule` of every document, [T, H, U], each piece once. given: tensors of the row, [T, ...]."""
    if not forest.shares:
        return rule(given, forest.lengths, uploads)
    device, by_level = given[0].device, levels_of(forest)
    order, place = uploads.once(("levels", forest), lambda: by_level.order, device)
    sizes = [level.tokens for level in by_level.levels]
    parts = zip(*(reordered(x, order, place).split(sizes) for x in given), strict=True)
    *above, deepest = zip(by_level.levels, parts, strict=True)
    outs, left = [], None

    def begun(level: Level) -> Tensor | None:
        if left is None:
            return None
        return left.index_select(0, uploads.once(("parents", level.lengths, forest), lambda: level.parents, device))

    for level, mine in above:
        out, left = rule_and_states(DeltaInputs(*mine), level.lengths, uploads, begun(level))
        outs.append(out)
    level, mine = deepest
    outs.append(rule(DeltaInputs(*mine), level.lengths, uploads, begun(level)))
    return reordered(torch.cat(outs), place, order)


def convolve_forest(
    convolution: Callable[..., Tensor], x_TX: Tensor, weight_XK: Tensor, forest: PrefixTree, uploads: VarlenCache
) -> Tensor:
    """Compute `short_convolution` of every document of the row, [T, X], each piece once."""
    apart_TX = convolution(x_TX, weight_XK, forest.lengths, uploads)
    width = weight_XK.shape[1]
    if not forest.shares or width == 1:
        return apart_TX
    branches = branches_of(forest, width - 1)
    there = lambda name: uploads.once((name, width, forest), lambda: getattr(branches, name), x_TX.device)
    near = convolution(x_TX.index_select(0, there("read")), weight_XK, branches.lengths, uploads)
    return apart_TX.index_copy(0, there("put"), near.index_select(0, there("own")))


@lru_cache(maxsize=64)
def levels_of(forest: PrefixTree) -> Levels:
    starts = [0, *accumulate(forest.lengths)]
    pieces: list[list[int]] = [[] for _ in range(max(forest.depths) + 1)]
    numbers = []  # index of each piece in its level
    for piece, depth in enumerate(forest.depths):
        numbers.append(len(pieces[depth]))
        pieces[depth].append(piece)
    order = torch.cat([torch.arange(starts[p], starts[p + 1]) for level in pieces for p in level])
    levels = [
        Level(
            tuple(forest.lengths[p] for p in level),
            torch.tensor([numbers[forest.parents[p]] for p in level if forest.parents[p] >= 0], dtype=torch.int64),
        )
        for level in pieces
    ]
    return Levels(torch.stack([order, order.argsort()]), tuple(levels))


@lru_cache(maxsize=64)
def branches_of(forest: PrefixTree, reach: int) -> Branches:
    """Find the branches of a row. reach: number of tokens before a token that its window sees."""
    starts = [0, *accumulate(forest.lengths)]
    last: list[list[int]] = []  # for each piece, the last tokens of its documents up to its end
    read, lengths, own, put = [], [], [], []
    for piece, parent in enumerate(forest.parents):
        before = last[parent] if parent >= 0 else []
        tokens = list(range(starts[piece], starts[piece + 1]))
        last.append([*before, *tokens[-reach:]][-reach:])
        if parent >= 0:
            first = tokens[:reach]
            own += range(len(read) + len(before), len(read) + len(before) + len(first))
            read += [*before, *first]
            lengths.append(len(before) + len(first))
            put += first
    return Branches(torch.tensor(read), tuple(lengths), torch.tensor(own), torch.tensor(put))
