"""Attention over packed rows: within a rank, and over a grid of Ulysses x ring ranks.

Shape suffixes: R tokens of this rank's slice of a packed row, W tokens of its ring rank (the whole row if the ring has
one rank), T tokens of one document, H query heads, K key/value heads (both of this TP rank), D width of a query or a
key, U width of a value.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from isoloss.parallel.collectives import all_to_all
from isoloss.parallel.ops.block_attention import Heads
from isoloss.parallel.ops.kv_cache import KeyValueCache
from isoloss.parallel.ops.prefix_tree import PrefixTree
from isoloss.parallel.ops.varlen import VarlenCache
from isoloss.parallel.ring import ring_attention


@dataclass
class PackedRow(PackedSeqParams):
    """The documents of a packed row, passed through Megatron's layers to the core attention.

    `qkv_format` stays None. Rotary embeddings are looked up by position ids, so any sharding of the row is right;
    Megatron's THD branch would assume its own zigzag sharding.

    lengths: tokens of each document of the whole row, in order; the sum is the length of the row, padding included.
    parents: if documents share prefixes, the parent of each piece, and `lengths` are tokens of pieces (`PrefixTree`).
    uploads: tensors on the device that all layers of this row share.
    cache: keys and values of rows that are generated. The row then has the prompts, or the newest token of each
        sequence, and every rank has a row of its own.
    query_factors_R: factors by position for the queries of this rank's slice; None in models that scale no queries.
    """

    lengths: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    uploads: VarlenCache = field(default_factory=VarlenCache)
    cache: KeyValueCache | None = None
    query_factors_R: Tensor | None = None

    @property
    def forest(self) -> PrefixTree:
        return PrefixTree(self.lengths, self.parents)

    def scaled(self, query_RHD: Tensor) -> Tensor:
        """Return the queries times their factors by position, in the type of the queries."""
        if self.query_factors_R is None:
            return query_RHD
        return query_RHD * self.query_factors_R.to(query_RHD.dtype)[:, None, None]


def grid_attention(
    query_RHD: Tensor,
    key_RKD: Tensor,
    value_RKU: Tensor,
    row: PackedRow,
    ulysses: dist.ProcessGroup,
    ring: dist.ProcessGroup,
    heads: Heads,
) -> Tensor:
    """Compute causal attention within each document of a row that is split over ring x ulysses, [R, H, U].

    An all-to-all over `ulysses` gives each rank all tokens of its ring rank for H/degree query heads and the key/value
    heads that they read; a second one returns the result (DeepSpeed-Ulysses, arXiv:2309.14509). Between the two, keys
    and values go round the ring.
    Collectives: two all-to-alls each way over `ulysses`, and those of `ring_attention`.
    """
    degree = ulysses.size()
    if degree == 1:
        return _attend(query_RHD, key_RKD, value_RKU, row, ring, heads)
    # Autograd sums the gradients of the copies.
    repeats = kv_repeats(query_RHD.shape[1], key_RKD.shape[1], degree)
    if repeats > 1:
        key_RKD, value_RKU = (t.repeat_interleave(repeats, dim=1) for t in (key_RKD, value_RKU))
    qkv = (query_RHD, key_RKD, value_RKU)
    shapes = [(t.shape[1] // degree, t.shape[2]) for t in qkv]  # heads of a rank, and their width
    # [degree, R, all channels of a rank]: concatenated in the order of sending, which saves the all-to-all a copy.
    blocks = torch.cat([t.reshape(t.shape[0], degree, -1).transpose(0, 1) for t in qkv], dim=2)
    exchanged = all_to_all(blocks, ulysses).flatten(0, 1)  # rank-major is row order
    query, key, value = (
        part.unflatten(1, shape) for part, shape in zip(exchanged.split([n * d for n, d in shapes], dim=1), shapes)
    )
    if heads.sinks_H is not None:
        heads = replace(heads, sinks_H=heads.sinks_H.chunk(degree)[ulysses.rank()])
    out_WHU = _attend(query, key, value, row, ring, heads)
    back = all_to_all(out_WHU.unflatten(0, (degree, -1)), ulysses)  # [degree, R, H/degree, U]
    return back.transpose(0, 1).flatten(1, 2)


def _attend(query_WHD, key_WKD, value_WKU, row: PackedRow, ring, heads: Heads) -> Tensor:
    forest = row.forest
    if _by_document(query_WHD, ring) and not forest.shares:
        return document_attention(query_WHD, key_WKD, value_WKU, row.lengths, heads)
    return ring_attention(query_WHD, key_WKD, value_WKU, forest, row.uploads, ring, heads)


def _by_document(query_WHD: Tensor, ring: dist.ProcessGroup) -> bool:
    """Return True on a CPU without a ring: its kernel knows no documents, and launching a kernel costs nothing."""
    return ring.size() == 1 and not query_WHD.is_cuda


def kv_repeats(heads: int, kv_heads: int, degree: int) -> int:
    """Return the copies of each key/value head that give every Ulysses rank the key/value heads of its query heads.

    One copy if the degree divides kv_heads, degree / kv_heads if kv_heads divides the degree, else a copy for each
    query head of the group.
    """
    if kv_heads % degree == 0:
        return 1
    return degree // kv_heads if degree % kv_heads == 0 else heads // kv_heads


def document_attention(
    query_WHD: Tensor, key_WKD: Tensor, value_WKU: Tensor, lengths: tuple[int, ...], heads: Heads
) -> Tensor:
    """Compute causal attention within each document of a whole row, [W, H, U], by one call a document, for a CPU.

    No document sees another. No collectives.
    """
    documents = zip(*(t.transpose(0, 1).split(lengths, dim=1) for t in (query_WHD, key_WKD, value_WKU)))
    grouped = query_WHD.shape[1] != key_WKD.shape[1]
    outputs = []
    for q, k, v in documents:
        if heads.sinks_H is None and (heads.window is None or q.shape[1] <= heads.window):
            out = scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=heads.scale, enable_gqa=grouped
            )[0]
        else:
            out = _masked_attention(q, k, v, heads)
        outputs.append(out)
    return torch.cat(outputs, dim=1).transpose(0, 1)


QUERY_BLOCK = 512


def _masked_attention(query_HTD: Tensor, key_KTD: Tensor, value_KTU: Tensor, heads: Heads) -> Tensor:
    """Compute the attention of one document with a window, sinks or both, [H, T, U].

    Blocks of queries read only the keys within reach. So the memory of a mask grows linearly with the length of the
    document, and with a window the work does too.
    """
    length = query_HTD.shape[1]
    grouped = query_HTD.shape[0] != key_KTD.shape[0]
    position = torch.arange(length, device=query_HTD.device)
    outputs = []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        first = 0 if heads.window is None else max(0, start - heads.window + 1)
        distance = position[start:stop, None] - position[None, first:stop]
        hidden = distance < 0 if heads.window is None else (distance < 0) | (distance >= heads.window)
        bias = torch.zeros(hidden.shape, dtype=query_HTD.dtype, device=query_HTD.device).masked_fill(hidden, -torch.inf)
        key, value = key_KTD[:, first:stop], value_KTU[:, first:stop]
        if heads.sinks_H is not None:  # a key of zeros, whose logit is the bias alone, with a value of zeros
            sinks = heads.sinks_H.to(bias.dtype)[:, None, None].expand(-1, stop - start, 1)
            bias = torch.cat([bias.expand(len(sinks), -1, -1), sinks], -1)
            key, value = (torch.cat([t, t.new_zeros(t.shape[0], 1, t.shape[2])], 1) for t in (key, value))
        outputs.append(
            scaled_dot_product_attention(
                query_HTD[None, :, start:stop], key[None], value[None], attn_mask=bias[None], scale=heads.scale,
                enable_gqa=grouped,
            )[0]
        )  # fmt: skip
    return torch.cat(outputs, dim=1)


class _SingleRank:
    """A stand-in for the process group of a ring of one rank, of which a ring reads only size and rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


SINGLE_RANK: Any = _SingleRank()


class PackedAttention(MegatronModule):
    """Attention over packed rows in Megatron-Core's slot `core_attention`.

    `softmax_offset`, Megatron's name, holds the sinks of this TP rank's heads. Each context rank has the gradient for
    its heads and queries, and Megatron sums gradients over the context group.

    ulysses, ring, tp_group: process groups.
    heads: options of the layer's heads, without sinks.
    sinks: True if the layer has learned sinks.
    """

    softmax_offset: nn.Parameter | None

    def __init__(
        self,
        config,
        layer_number: int = 0,
        *unused,
        ulysses: dist.ProcessGroup,
        ring: dist.ProcessGroup,
        tp_group: dist.ProcessGroup,
        heads: Heads,
        sinks: bool,
        **also_unused,
    ):
        super().__init__(config)
        del unused, also_unused
        self.layer_number, self.heads = layer_number, heads
        self.ulysses, self.ring, self.tp_group = ulysses, ring, tp_group
        offset = None
        if sinks:
            count = config.num_attention_heads // tp_group.size()
            empty = torch.empty(count, dtype=config.params_dtype, device=torch.cuda.current_device())
            offset = nn.Parameter(empty)
            set_tensor_model_parallel_attributes(offset, True, 0, 1)
        self.register_parameter("softmax_offset", offset)

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        """Return the attention of a packed row, [R, 1, H*U]. Collectives: those of `grid_attention`.

        query: [R, 1, H, D]. key: [R, 1, K, D]. value: [R, 1, K, U].
        packed_seq_params: documents of the row; with a cache no collective is entered.
        """
        assert isinstance(packed_seq_params, PackedRow) and attention_mask is None and attention_bias is None
        query, key, value = (t.squeeze(1) for t in (query, key, value))
        query = packed_seq_params.scaled(query)
        heads = replace(self.heads, sinks_H=self.softmax_offset)
        if packed_seq_params.cache is not None:
            out = self._with_cache(query, key, value, packed_seq_params, packed_seq_params.cache, heads)
        else:
            out = grid_attention(query, key, value, packed_seq_params, self.ulysses, self.ring, heads)
        return out.reshape(out.shape[0], 1, -1)

    def _with_cache(
        self, query: Tensor, key: Tensor, value: Tensor, row: PackedRow, cache: KeyValueCache, heads: Heads
    ) -> Tensor:
        if cache.reads_prompts:
            cache.keep_prompts(self.layer_number, key, value)
            return _attend(query, key, value, row, SINGLE_RANK, heads)
        rows = len(cache.behind)  # the rest of the row is padding
        query, key, value, padding = query[:rows], key[:rows], value[:rows], len(query) - rows
        out = cache.attend(self.layer_number, query, key, value, heads)
        return torch.cat([out, out.new_zeros(padding, *out.shape[1:])]) if padding else out

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the sinks, sharded over TP, the only parameter of this module."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
