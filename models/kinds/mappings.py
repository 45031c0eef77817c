"""The mappings between a Megatron-Core weight, its Hugging Face tensors and its tensor-parallel shards.

A mapping is four inverse pairs of pure functions on tensors of any dtype:

    Hugging Face tensors  --merge-->  whole  --shard-->  this rank's piece
                          <--split--         <--unshard--

`whole` is the Megatron-Core weight before tensor parallelism, with the vocabulary at its true size. Everything works
alike on weights, gradients and optimizer moments. Shards are contiguous copies; the results of the others may be views.

Letters: g kv heads, h attention heads, d width of a query or key head, u of a value head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from isoloss.parallel.runtime.errors import UserError

VOCABULARY_MULTIPLE = 128


class ParamMapping(Protocol):
    def merge(self, tensors: Sequence[Tensor]) -> Tensor: ...

    def split(self, whole: Tensor) -> tuple[Tensor, ...]: ...

    def shard(self, whole: Tensor, tp_size: int, tp_rank: int) -> Tensor:
        """The piece of rank `tp_rank`. Raises UserError where `tp_size` does not divide what has to be divided."""
        ...

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole from the pieces of all ranks, in rank order."""
        ...


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Rows of the embedding in memory: the next multiple of 128 that `tp_size` divides into equal shards."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, tp_size)
    return -(-vocab_size // multiple) * multiple


class _OneTensor:
    """The Hugging Face tensor is the Megatron-Core weight."""

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        (whole,) = tensors
        return whole

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return (whole,)


@dataclass(frozen=True)
class Replicated(_OneTensor):
    """The same on every rank (norms)."""

    def shard(self, whole: Tensor, tp_size: int, tp_rank: int) -> Tensor:
        return whole.clone()

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0]


@dataclass(frozen=True)
class ColumnParallel(_OneTensor):
    """Output features (dim 0) in equal contiguous runs: a column-parallel linear layer, a number for each head."""

    def shard(self, whole: Tensor, tp_size: int, tp_rank: int) -> Tensor:
        return _piece(whole, 0, tp_size, tp_rank, "output features")

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards), 0)


@dataclass(frozen=True)
class RowParallel(_OneTensor):
    """Input features (dim 1) in equal contiguous runs: a row-parallel linear layer."""

    def shard(self, whole: Tensor, tp_size: int, tp_rank: int) -> Tensor:
        return _piece(whole, 1, tp_size, tp_rank, "input features")

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards), 1)


@dataclass(frozen=True)
class TransposedRowParallel(RowParallel):
    """`RowParallel` of a matrix that Hugging Face stores as [input features, output features]."""

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        return super().merge(tensors).T

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return (whole.T,)


@dataclass(frozen=True)
class QKV:
    """q, k and v interleaved: for each kv head its h/g query heads, then its key head, then its value head.

    merge takes q [h*d, *], k [g*d, *], v [g*u, *] (biases: without *) and gives [(h+g)*d+g*u, *]. value_dim 0: there is
    no v.
    A shard is a contiguous run of rows: of whole kv groups, or with more ranks than kv heads of a part of one (Megatron
    then gathers the projection over TP and picks each rank's query heads).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        groups = zip(*(tensor.chunk(self.num_kv_heads, 0) for tensor in tensors))
        return torch.cat([piece for group in groups for piece in group], 0)

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        rest, g, d = whole.shape[1:], self.num_kv_heads, self.head_dim
        sizes = [self.num_heads // g * d, d, self.value_dim]
        groups = whole.reshape(g, -1, *rest).split(sizes if self.value_dim else sizes[:2], 1)
        return tuple(piece.reshape(-1, *rest) for piece in groups)

    def shard(self, whole: Tensor, tp_size: int, tp_rank: int) -> Tensor:
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            raise UserError(
                f"parallel.tp={tp_size} neither divides nor is a multiple of the model's {self.num_kv_heads} "
                "key/value heads; choose a divisor (more ranks can go to parallel.ulysses or pp)"
            )
        return _piece(whole, 0, tp_size, tp_rank, "rows of q, k and v")

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards), 0)


@dataclass(frozen=True)
class GatedQKV(QKV):
    """`QKV` with a gate for each query head: for each kv head its query heads, their gates, its key, its value head.

    merge takes q [2*h*d, *], in which each head's gate follows it, k and v as `QKV` does and gives [2*(h+g)*d, *].
    """

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        q, k, v = tensors
        heads = q.unflatten(0, (self.num_kv_heads, -1, 2, self.head_dim))  # [g, h/g, q or gate, d, *]
        whole = torch.cat([heads.transpose(1, 2).flatten(1, 3), self._by_head(k), self._by_head(v)], 1)
        return whole.flatten(0, 1)

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        per_group, d = self.num_heads // self.num_kv_heads, self.head_dim
        groups = whole.unflatten(0, (self.num_kv_heads, -1)).split([2 * per_group * d, d, d], 1)
        queries, k, v = groups
        queries = queries.unflatten(1, (2, per_group, d)).transpose(1, 2).flatten(0, 3)
        return queries, k.flatten(0, 1), v.flatten(0, 1)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.num_kv_heads, self.head_dim))


@dataclass(frozen=True)
class Sections:
    """Blocks of output features (dim 0), one below the other, each divided over TP: queries, keys, values and more.

    sizes: rows of each block.
    names: names of the blocks in a Megatron-Core checkpoint, where each is a tensor.
    parts: rows of each Hugging Face tensor; () where one tensor holds all blocks.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    parts: tuple[int, ...] = ()

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors), 0)

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return whole.split(list(self.parts), 0) if self.parts else (whole,)

    def shard(self, whole: Tensor, tp_size: int, tp_rank: int) -> Tensor:
        blocks = zip(whole.split(list(self.sizes), 0), self.names)
        return torch.cat([_piece(block, 0, tp_size, tp_rank, f"{name} features") for block, name in blocks], 0)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        ranks = [shard.split([size // len(shards) for size in self.sizes], 0) for shard in shards]
        return torch.cat([piece for block in zip(*ranks) for piece in block], 0)


@dataclass(frozen=True)
class WovenSections(Sections):
    """`Sections` from Hugging Face tensors that hold, for each key head, its share of several blocks (Qwen3-Next).

    groups: key heads.
    parts: how many blocks each Hugging Face tensor weaves.
    """

    groups: int = 1

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        blocks, sizes = [], iter(self.sizes)
        for tensor, count in zip(tensors, self.parts):
            widths = [next(sizes) // self.groups for _ in range(count)]
            blocks += [block.flatten(0, 1) for block in tensor.unflatten(0, (self.groups, -1)).split(widths, 1)]
        return torch.cat(blocks, 0)

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        blocks = iter(whole.split(list(self.sizes), 0))
        by_group = (
            torch.cat([next(blocks).unflatten(0, (self.groups, -1)) for _ in range(count)], 1) for count in self.parts
        )
        return tuple(group.flatten(0, 1) for group in by_group)


@dataclass(frozen=True)
class GatedMLP:
    """The two inputs of SwiGLU: the whole is [gate; up], the shard of rank r is [gate_r; up_r]."""

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        gate, up = tensors
        return torch.cat([gate, up], 0)

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return whole.chunk(2, 0)

    def shard(self, whole: Tensor, tp_size: int, tp_rank: int) -> Tensor:
        halves = whole.chunk(2, 0)
        return torch.cat([_piece(half, 0, tp_size, tp_rank, "MLP features (intermediate_size)") for half in halves], 0)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        halves = [shard.chunk(2, 0) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves], 0)


@dataclass(frozen=True)
class JoinedGatedMLP(GatedMLP):
    """`GatedMLP` from one Hugging Face tensor that has gate above up."""

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        return tensor

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return (whole,)


@dataclass(frozen=True)
class InterleavedGatedMLP(GatedMLP):
    """`GatedMLP` from one Hugging Face tensor whose last dimension alternates gate and up: gpt-oss's weight
    [input features, 2 * intermediate] and bias [2 * intermediate]."""

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        columns_first = tensor.movedim(-1, 0)
        return super().merge([columns_first[0::2], columns_first[1::2]])

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return (torch.stack(whole.chunk(2, 0), 1).flatten(0, 1).movedim(0, -1),)


@dataclass(frozen=True)
class Vocabulary(_OneTensor):
    """A matrix with a row a token (dim 0), padded with zero rows so that the ranks' contiguous runs are equal."""

    vocab_size: int

    def shard(self, whole: Tensor, tp_size: int, tp_rank: int, padded_vocab: int | None = None) -> Tensor:
        """padded_vocab: rows in all shards together; by default `padded_vocab_size`."""
        padded = padded_vocab_size(self.vocab_size, tp_size) if padded_vocab is None else padded_vocab
        # Only this rank's rows are copied: the embedding of a large model is gigabytes.
        rows = padded // tp_size
        if rows * tp_size != padded or padded < self.vocab_size:
            raise ValueError(f"padded_vocab={padded} must be a multiple of {tp_size} and at least {self.vocab_size}")
        own = whole[tp_rank * rows : (tp_rank + 1) * rows]
        padding = whole.new_zeros(rows - own.shape[0], *whole.shape[1:])
        return torch.cat([own, padding], 0)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards), 0)[: self.vocab_size]


def _piece(whole: Tensor, dim: int, tp_size: int, tp_rank: int, what: str) -> Tensor:
    size = whole.shape[dim]
    if size % tp_size:
        raise UserError(f"parallel.tp={tp_size} does not divide the model's {size} {what}; choose a divisor")
    return whole.narrow(dim, tp_rank * (size // tp_size), size // tp_size).clone(memory_format=torch.contiguous_format)
