"""Exchange of tokens for heads over all ranks that share a packed row, for layers that read all tokens of a document in
order. On every grid of Ulysses x ring ranks, each rank gets the whole row for its share of the heads.

Shape suffixes: R tokens of this rank's slice of a packed row, T tokens of the whole row, X channels.
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
    """The grid of ranks that share a row.

    context: group of all these ranks; Ulysses ranks are neighbours in it.
    ring: size of the ring.
    ulysses: Ulysses ranks at each position of the ring.
    """

    context: dist.ProcessGroup
    ring: int
    ulysses: int

    @classmethod
    def over(cls, mesh: Mesh) -> "HeadExchange":
        """Return the exchange over the context ranks of a mesh."""
        ranks = mesh.context.size()
        if mesh.cp_kernel != "isoloss":  # Transformer Engine's kernels cut one zigzag over all context ranks
            return cls(mesh.context, ranks, 1)
        return cls(mesh.context, mesh.ring.size(), mesh.ulysses.size())

    @property
    def ranks(self) -> int:
        return self.context.size()

    def own(self, x: Tensor) -> Tensor:
        """Return the part of this rank's share of the heads, from a tensor with all heads in dim 0."""
        return x.chunk(self.ranks)[self.context.rank()]

    def to_heads(self, parts: Sequence[Tensor], row: PackedRow) -> Tensor:
        """Return all tokens of this rank's share of the heads, [T, X], in the order of the row.

        parts: tensors [R, channels], channels ordered by head; X concatenates this rank's share of each part.
        Collectives: one all-to-all each way.
        """
        if self.ranks == 1:
            return torch.cat(list(parts), 1)
        # [ranks, R, X]: concatenated in the order of sending, which saves the all-to-all a copy.
        by_rank = torch.cat([part.unflatten(1, (self.ranks, -1)).transpose(0, 1) for part in parts], 2)
        arrived_TX = all_to_all(by_rank, self.context).flatten(0, 1)
        if self.ring == 1:
            return arrived_TX
        order, inverse = self._order(row, arrived_TX.device)
        return reordered(arrived_TX, inverse, order)

    def to_tokens(self, x_TX: Tensor, row: PackedRow) -> Tensor:
        """Invert `to_heads` for one part: [T, X] -> [R, channels] of all heads. One all-to-all each way."""
        if self.ranks == 1:
            return x_TX
        if self.ring > 1:
            order, inverse = self._order(row, x_TX.device)
            x_TX = reordered(x_TX, order, inverse)
        back = all_to_all(x_TX.unflatten(0, (self.ranks, -1)), self.context)  # [ranks, R, X]
        return back.transpose(0, 1).flatten(1)

    def _order(self, row: PackedRow, device: torch.device) -> Tensor:
        """Return the token of each position, [T], if the slices of all ranks are concatenated, and the inverse, [T]."""
        grid = (row.lengths, self.ring, self.ulysses)
        return row.uploads.once(("order", *grid), lambda: _order(*grid), device)


@lru_cache(maxsize=64)
def _order(lengths: tuple[int, ...], ring: int, ulysses: int) -> Tensor:
    ranks = [(ring_rank, ulysses_rank) for ring_rank in range(ring) for ulysses_rank in range(ulysses)]
    order = torch.cat([tokens_of(lengths, ring, ring_rank, ulysses, ulysses_rank) for ring_rank, ulysses_rank in ranks])
    return torch.stack([order, order.argsort()])
