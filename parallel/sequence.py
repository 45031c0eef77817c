"""Splitting a packed row over the ranks that share it: zigzag over the ring, in order over Ulysses.

Each document is cut into 2P chunks for a ring of P ranks; rank r has chunks r and 2P-1-r, so that all have the same
share of the causal triangle. What the ring rank has, its Ulysses ranks hold in order, one slice each. Documents are not
padded: the tokens that 2P does not divide go to the ranks in turn, over the whole row, so that every rank has the same
number of tokens as soon as P divides the row.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from isoloss.parallel.collectives import sum_over_ranks
from isoloss.parallel.mesh import Mesh
from isoloss.parallel.ops.row_order import tokens_of


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
