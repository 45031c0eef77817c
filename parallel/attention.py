"""Ulysses attention over packed rows: all-to-all of heads around any core attention.

Shape suffixes: R tokens of this rank's slice of a packed row, G tokens of the whole row, H query heads, K key/value
heads (both of this TP rank), D head size, U Ulysses degree.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from isoloss.parallel.collectives import all_to_all


@dataclass
class PackedRow(PackedSeqParams):
    """The documents of a packed row, passed through Megatron's layers to the core attention.

    `qkv_format` stays None: rotary embeddings are looked up by position ids (so any sharding of the row is right),
    and Megatron's THD branch, which assumes its own zigzag sharding, is not taken.

    lengths: tokens of each document of the *whole* row, in order; they add up to the row, padding included.
    """

    lengths: tuple[int, ...] = ()


def ulysses_attention(
    query_RHD: Tensor,
    key_RKD: Tensor,
    value_RKD: Tensor,
    lengths: tuple[int, ...],
    group: dist.ProcessGroup,
    scale: float,
) -> Tensor:
    """Causal attention within each document of a row that is split, in order, over `group`. Returns [R, H, D].

    One all-to-all brings all tokens of H/U query heads (and the key/value heads they read) to each rank, a second one
    takes the result back (DeepSpeed-Ulysses, arXiv:2309.14509). Key/value heads are repeated where U does not divide
    them; autograd sums the gradients of the copies.
    """
    degree = group.size()
    if degree == 1:
        return document_attention(query_RHD, key_RKD, value_RKD, lengths, scale)
    heads, kv_heads = query_RHD.shape[1], key_RKD.shape[1]
    repeats = kv_repeats(heads, kv_heads, degree)
    if repeats > 1:
        key_RKD, value_RKD = (t.repeat_interleave(repeats, dim=1) for t in (key_RKD, value_RKD))
    qkv = [t.unflatten(1, (degree, -1)) for t in (query_RHD, key_RKD, value_RKD)]  # [R, U, heads/U, D]
    sizes = [t.shape[2] for t in qkv]
    exchanged = all_to_all(torch.cat(qkv, dim=2).transpose(0, 1), group)  # [U, R, heads/U, D]: rank-major is row order
    query, key, value = exchanged.flatten(0, 1).split(sizes, dim=1)
    out_GHD = document_attention(query, key, value, lengths, scale)
    back = all_to_all(out_GHD.unflatten(0, (degree, -1)), group)  # [U, R, H/U, D]
    return back.transpose(0, 1).flatten(1, 2)


def kv_repeats(heads: int, kv_heads: int, degree: int) -> int:
    """How often each key/value head is repeated so that rank r's query heads find theirs among its own share.

    None if the degree divides kv_heads; once a rank if kv_heads divides the degree; else up to one for each query head.
    """
    if kv_heads % degree == 0:
        return 1
    return degree // kv_heads if degree % kv_heads == 0 else heads // kv_heads


def document_attention(query_GHD: Tensor, key_GKD: Tensor, value_GKD: Tensor, lengths: tuple[int, ...], scale: float):
    """Causal attention within each document of a whole row, [G, H, D]; no document sees another. No collectives."""
    grouped = query_GHD.shape[1] != key_GKD.shape[1]
    documents = zip(*(t.transpose(0, 1).split(lengths, dim=1) for t in (query_GHD, key_GKD, value_GKD)))
    outputs = [
        scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=grouped)[0]
        for q, k, v in documents
    ]
    return torch.cat(outputs, dim=1).transpose(0, 1)


class PackedAttention(nn.Module):
    """Megatron-Core's `core_attention` slot. Parameter-free; `group` is the Ulysses group, set by the layer spec."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, *, group, softmax_scale=None, **unused):
        super().__init__()
        del layer_number, attn_mask_type, attention_type, unused
        self.group = group
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        """query: [R, 1, H, D]; key, value: [R, 1, K, D]. Returns [R, 1, H*D]."""
        assert isinstance(packed_seq_params, PackedRow) and attention_mask is None and attention_bias is None
        query, key, value = (t.squeeze(1) for t in (query, key, value))
        out = ulysses_attention(query, key, value, packed_seq_params.lengths, self.group, self.scale)
        return out.reshape(out.shape[0], 1, -1)
