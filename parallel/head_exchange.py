"""Heads against tokens over all ranks that share a packed row, for layers that need every token of a document in order:
what comes out are whole rows of a share of the heads, whatever the grid of Ulysses x ring ranks is.

Shape suffixes: R tokens of this rank's slice of a packed row, T of the whole row, X channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.attention import PackedRow
from isoloss.parallel.collectives import all_to_all
from isoloss.parallel.mesh import Mesh
from isoloss.parallel.ops.row_order import reordered, tokens_of


@dataclass(frozen=True)
class HeadExchange:
    """context: the ranks that share a row: rings of so many, each of so many Ulysses ranks, the latter neighbours."""

    context: dist.ProcessGroup
    ring: int
    ulysses: int

    @classmethod
    def over(cls, mesh: Mesh) -> "HeadExchange":
        """Transformer Engine's kernels want one zigzag over all context ranks (`own_tokens`)."""
        ranks = mesh.context.size()
        if mesh.cp_kernel != "isoloss":
            return cls(mesh.context, ranks, 1)
        return cls(mesh.context, mesh.ring.size(), mesh.ulysses.size())

    @property
    def ranks(self) -> int:
        return self.context.size()

    def own(self, of_heads: Tensor) -> Tensor:
        """What belongs to this rank's share of the heads, of what all ranks hold whole, by heads in dim 0."""
        return of_heads.chunk(self.ranks)[self.context.rank()]

    def to_heads(self, parts: Sequence[Tensor], row: PackedRow) -> Tensor:
        """parts: [R, channels] each, by heads. Returns [T, X] in the order of the row: this rank's share of each part,
        one after the other. One all-to-all each way."""
        if self.ranks == 1:
            return torch.cat(list(parts), 1)
        # [ranks, R, X]: joined in the order in which they are sent, which else takes one copy more.
        by_rank = torch.cat([part.unflatten(1, (self.ranks, -1)).transpose(0, 1) for part in parts], 2)
        arrived_TX = all_to_all(by_rank, self.context).flatten(0, 1)
        if self.ring == 1:
            return arrived_TX
        held, place = self._order(row, arrived_TX.device)
        return reordered(arrived_TX, place, held)

    def to_tokens(self, x_TX: Tensor, row: PackedRow) -> Tensor:
        """The way back of one part: [R, channels] of all heads. One all-to-all each way."""
        if self.ranks == 1:
            return x_TX
        if self.ring > 1:
            held, place = self._order(row, x_TX.device)
            x_TX = reordered(x_TX, held, place)
        back = all_to_all(x_TX.unflatten(0, (self.ranks, -1)), self.context)  # [ranks, R, X]
        return back.transpose(0, 1).flatten(1)

    def _order(self, row: PackedRow, device: torch.device) -> Tensor:
        """[2, T]: the tokens that the ranks hold, one rank after the other; and where each token is among them."""
        grid = (row.lengths, self.ring, self.ulysses)
        return row.uploads.once(("order", *grid), lambda: _order(*grid), device)


@lru_cache(maxsize=64)
def _order(lengths: tuple[int, ...], ring: int, ulysses: int) -> Tensor:
    ranks = [(ring_rank, ulysses_rank) for ring_rank in range(ring) for ulysses_rank in range(ulysses)]
    held = torch.cat([tokens_of(lengths, ring, ring_rank, ulysses, own) for ring_rank, own in ranks])
    return torch.stack([held, held.argsort()])
