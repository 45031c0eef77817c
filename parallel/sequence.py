"""Splitting a packed row over the ranks that share it: zigzag over the ring, in order over Ulysses.

For a ring of P ranks, each document is cut into 2P chunks. Rank r has chunks r and 2P-1-r, so all ranks have the same
share of the causal triangle. The tokens of a ring rank are cut into one slice for each of its Ulysses ranks, in order.
Documents are not padded: the tokens that 2P does not divide go to the ranks in turn, over the whole row. So every rank
has the same number of tokens if P divides the length of the row.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.collectives import sum_over_ranks
from isoloss.parallel.mesh import Mesh
from isoloss.parallel.ops.row_order import tokens_of


def padded_length(tokens: int, mesh: Mesh) -> int:
    """Return the length of a packed row of `tokens` tokens, the next multiple that splits evenly over its ranks."""
    multiple = mesh.row_multiple
    return max(-(-tokens // multiple), 1) * multiple


def padded_document(tokens: int, mesh: Mesh) -> int:
    """Return the padded length of a document of `tokens` tokens in a packed row."""
    return -(-tokens // mesh.document_multiple) * mesh.document_multiple


def row_length(lengths: Sequence[int], mesh: Mesh) -> int:
    """Return the length of a whole packed row of documents of these lengths, with all padding."""
    return padded_length(sum(padded_document(length, mesh) for length in lengths), mesh)


def own_tokens(lengths: tuple[int, ...], mesh: Mesh) -> Tensor:
    """Return the indices of this rank's tokens in a whole row (`tokens_of`).

    Targets are shifted before rows are sharded, so no rank needs a token of a neighbour.
    """
    if mesh.cp_kernel != "isoloss":  # Transformer Engine's kernels cut one zigzag over all context ranks
        return tokens_of(lengths, mesh.context.size(), mesh.context.rank())
    return tokens_of(lengths, mesh.ring.size(), mesh.ring.rank(), mesh.ulysses.size(), mesh.ulysses.rank())


def sum_over_documents(values_N: Tensor, document_N: Tensor, num_documents: int, group: dist.ProcessGroup) -> Tensor:
    """Sum per-token values over documents whose tokens are on several ranks, [num_documents] on each rank.

    document_N: index of the document of every value. Differentiable. One all-reduce over `group` each way.
    """
    totals = values_N.new_zeros(num_documents).index_add(0, document_N, values_N)
    return sum_over_ranks(totals, group)
