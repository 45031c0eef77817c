"""Splitting a packed row over the ranks that share it."""

from torch import Tensor

from isoloss.parallel.mesh import Mesh


def padded_length(tokens: int, mesh: Mesh) -> int:
    """The length of a packed row of `tokens` tokens: the next multiple that splits evenly over the context ranks."""
    multiple = mesh.row_multiple
    return max(-(-tokens // multiple), 1) * multiple


def shard(row: Tensor, mesh: Mesh) -> Tensor:
    """This rank's slice of dim 0 of a whole packed row: contiguous and in order over the Ulysses ranks.

    Whole rows are sharded after targets were shifted, so no rank ever needs its neighbour's first token.
    """
    group = mesh.context
    return row if group.size() == 1 else row.chunk(group.size())[group.rank()].contiguous()
