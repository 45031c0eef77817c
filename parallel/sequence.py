"""Splitting a packed row over the ranks that share it."""

import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.collectives import sum_over_ranks
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


def sum_over_documents(values_N: Tensor, document_N: Tensor, num_documents: int, group: dist.ProcessGroup) -> Tensor:
    """Sums of per-token values over whole documents whose tokens lie on several ranks, [num_documents] on each.

    document_N: the document of every value. Differentiable; one all-reduce over `group` each way.
    """
    totals = values_N.new_zeros(num_documents).index_add(0, document_N, values_N)
    return sum_over_ranks(totals, group)
