"""Attention of the queries of one ring rank to the keys of another, and its gradient: by FlashAttention on a GPU, else
document by document.

An output and the log-sum-exp of its scores suffice to merge attention to several sets of keys. With the final
log-sum-exp, the gradient of each set can be computed alone. FlashAttention does the same inside a device
(arXiv:2205.14135).

Shape suffixes: Q tokens of the rank of the queries, Y tokens of the owner of the keys, I queries and J keys of one
block, H query heads, K key/value heads, F query heads of each key/value head, D width of a query or a key, U width of a
value.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from isoloss.parallel.ops import flash_attention
from isoloss.parallel.ops.flash_attention import Attended
from isoloss.parallel.ops.fused import Fused
from isoloss.parallel.ops.mask_blocks import Block, size_of
from isoloss.parallel.ops.varlen import VarlenCache

QUERY_BLOCK = 512  # queries of one document whose scores exist at a time, unless a kernel keeps no scores
Seen = tuple[Tensor, Tensor]  # the output [Q, H, U] for the keys so far, and the log-sum-exp of their scores [Q, H]


@dataclass(frozen=True)
class Heads:
    """Options of the query heads of a layer.

    scale: factor of the scores.
    window: tokens that a token sees, itself included; None: all tokens before it.
    sinks_H: an extra logit of each head in the softmax, without a value (arXiv:2309.17453, learned); None: no sinks.
    flash: True lets FlashAttention compute the layer where it has a kernel.
    """

    scale: float
    window: int | None = None
    sinks_H: Tensor | None = None
    flash: bool = True


def attend(
    query_QHD: Tensor,
    key_YKD: Tensor,
    value_YKU: Tensor,
    blocks: tuple[Block, ...],
    heads: Heads,
    uploads: VarlenCache,
    seen: Seen | None,
) -> Seen:
    """Merge attention to these blocks into `seen`, in at least fp32.

    The output of a single call of FlashAttention keeps the precision of the queries.

    blocks: visible pairs of queries and keys, with the window applied.
    heads: options, of which `scale` and `flash` are read; the caller adds the sinks.
    uploads: tensors on the device that all layers of the row share.
    seen: result for earlier keys, overwritten; None: no earlier keys, and then every query must be in some block.
    """
    if heads.flash and flash_attention.takes(query_QHD):
        return _attend_by_flash(query_QHD, key_YKD, value_YKU, blocks, heads.scale, uploads, seen)
    out_QHU, lse_QH = seen or _nothing(query_QHD, value_YKU)
    kv_heads = key_YKD.shape[1]
    for block in blocks:
        q_KFID = _grouped(query_QHD[block.queries], kv_heads)
        k_KJD, v_KJU = (t[block.keys].transpose(0, 1) for t in (key_YKD, value_YKU))
        forward = _fused if _fused_on_cpu(q_KFID, block) else _plain
        out_KFIU, lse_KFI = forward(q_KFID, k_KJD, v_KJU, block, heads.scale)
        partial = _ungrouped(out_KFIU), _ungrouped(lse_KFI)
        out_QHU[block.queries], lse_QH[block.queries] = _merge(out_QHU[block.queries], lse_QH[block.queries], *partial)
    return out_QHU, lse_QH


def _nothing(query_QHD: Tensor, value_YKU: Tensor) -> Seen:
    dtype = _statistics(query_QHD)
    out = query_QHD.new_zeros((*query_QHD.shape[:2], value_YKU.shape[2]), dtype=dtype)
    return out, query_QHD.new_full(query_QHD.shape[:2], -torch.inf, dtype=dtype)


def _grouped(x_IHx: Tensor, kv_heads: int) -> Tensor:
    """Group query heads by key/value head: [I, H, ...] -> [K, F, I, ...]."""
    return x_IHx.unflatten(1, (kv_heads, -1)).movedim(0, 2)


def _ungrouped(x_KFIx: Tensor) -> Tensor:
    """Invert `_grouped`."""
    return x_KFIx.movedim(2, 0).flatten(1, 2)


def _union(lse: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-sum-exp over both sets of keys, and the share of each set in the softmax over both."""
    union = torch.logaddexp(lse, more_lse)
    return union, (lse - union).exp(), (more_lse - union).exp()


def _weighted(out: Tensor, share: Tensor, more_out: Tensor, more_share: Tensor) -> Tensor:
    return out * share[..., None] + more_out * more_share[..., None]


union, weighted = Fused(_union), Fused(_weighted)


def _merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> Seen:
    """Compute the softmax over the union of two sets of keys from the softmax over each."""
    union_lse, share, more_share = union(lse, more_lse)
    return weighted(out, share, more_out, more_share), union_lse


def attend_backward(
    grad_QHU: Tensor, attended: Attended, blocks: tuple[Block, ...], heads: Heads, uploads: VarlenCache
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the part of these blocks in the gradients of queries, keys and values, in at least fp32.

    A single call of FlashAttention that covers all tokens returns gradients in the precision of the queries.

    attended: tensors of the forward; output and log-sum-exp over all keys that the queries see, on all ranks.
    blocks, heads, uploads: see `attend`.
    """
    if heads.flash and flash_attention.takes(attended.query):
        return _attend_backward_by_flash(grad_QHU, attended, blocks, heads.scale, uploads)
    kv_heads = attended.key.shape[1]
    grad_query, grad_key, grad_value = _no_gradients(attended)
    for block in blocks:
        grad, query, out, lse = (
            _grouped(t[block.queries], kv_heads) for t in (grad_QHU, attended.query, attended.out, attended.lse)
        )
        key, value = (t[block.keys].transpose(0, 1) for t in (attended.key, attended.value))
        backward = _fused_backward if _fused_on_cpu(query, block) else _plain_backward
        dq_KFID, dk_KJD, dv_KJU = backward(grad, Attended(query, key, value, out, lse), block, heads.scale)
        grad_query[block.queries] += _ungrouped(dq_KFID)
        grad_key[block.keys] += dk_KJD.transpose(0, 1)
        grad_value[block.keys] += dv_KJU.transpose(0, 1)
    return grad_query, grad_key, grad_value


def _no_gradients(attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.zeros_like(t, dtype=attended.lse.dtype) for t in attended[:3])
    return query, key, value


def _statistics(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


# ---- plain matrix products: any device, precision and mask ----------------------------------------------------------


def _visible(block: Block, rows: slice, queries: int, keys: int, device: torch.device) -> tuple[slice, Tensor | None]:
    """Return the keys that some of the queries `rows` of a block see, and a mask [i, j] of visible pairs; None: all."""
    ahead = keys - queries  # a block aligns queries and keys at their ends
    first = 0 if block.left is None else max(0, rows.start + ahead - block.left)
    stop = keys if block.right is None else min(keys, rows.stop + ahead + block.right)
    if block.left is None and block.right is None:
        return slice(first, stop), None
    query = torch.arange(rows.start, rows.stop, device=device)[:, None] + ahead
    distance = torch.arange(first, stop, device=device) - query
    visible = torch.ones_like(distance, dtype=torch.bool) if block.right is None else distance <= block.right
    return slice(first, stop), visible if block.left is None else visible & (distance >= -block.left)


def _scores(q_KFiD: Tensor, k_KJD: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    scores_KFiJ = torch.einsum("kfid,kjd->kfij", q_KFiD, k_KJD) * scale
    return scores_KFiJ if visible is None else scores_KFiJ.masked_fill(~visible, -torch.inf)


def _row_blocks(length: int) -> list[slice]:
    return [slice(start, min(start + QUERY_BLOCK, length)) for start in range(0, length, QUERY_BLOCK)]


def _plain(q_KFID: Tensor, k_KJD: Tensor, v_KJU: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    dtype, queries, keys = _statistics(q_KFID), q_KFID.shape[2], k_KJD.shape[1]
    q, k, v = (t.to(dtype) for t in (q_KFID, k_KJD, v_KJU))
    outputs, sums = [], []
    for rows in _row_blocks(queries):
        reached, visible = _visible(block, rows, queries, keys, q.device)
        scores = _scores(q[:, :, rows], k[:, reached], scale, visible)
        lse = scores.logsumexp(-1)
        outputs.append(torch.einsum("kfij,kju->kfiu", (scores - lse[..., None]).exp(), v[:, reached]))
        sums.append(lse)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def _plain_backward(grad_KFIU: Tensor, attended: Attended, block: Block, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """attended: tensors of the block, of queries as [K, F, I, ...] and of keys as [K, J, ...]."""
    dtype, queries, keys = _statistics(attended.query), attended.query.shape[2], attended.key.shape[1]
    grad, q, k, v, out = (t.to(dtype) for t in (grad_KFIU, *attended[:4]))
    grad_k, grad_v, grads_q = torch.zeros_like(k), torch.zeros_like(v), []
    for rows in _row_blocks(queries):
        reached, visible = _visible(block, rows, queries, keys, q.device)
        scores = _scores(q[:, :, rows], k[:, reached], scale, visible)
        weights = (scores - attended.lse[:, :, rows, None]).exp()
        delta = (grad[:, :, rows] * out[:, :, rows]).sum(-1, keepdim=True)
        grad_scores = weights * (torch.einsum("kfiu,kju->kfij", grad[:, :, rows], v[:, reached]) - delta) * scale
        grads_q.append(torch.einsum("kfij,kjd->kfid", grad_scores, k[:, reached]))
        grad_k[:, reached] += torch.einsum("kfij,kfid->kjd", grad_scores, q[:, :, rows])
        grad_v[:, reached] += torch.einsum("kfij,kfiu->kju", weights, grad[:, :, rows])
    return torch.cat(grads_q, 2), grad_k, grad_v


# ---- PyTorch's fused kernel of the CPU: the key/value heads are its batch, each seen by F query heads ---------------


def _fused_on_cpu(query_KFID: Tensor, block: Block) -> bool:
    """Return True if the kernel can compute this block: it has no window and aligns its causal mask at the start."""
    square = size_of(block.queries) == size_of(block.keys)
    return query_KFID.is_cpu and block.left is None and (block.right is None or (block.right == 0 and square))


def _to_group(kv_KJx: Tensor, query_KFID: Tensor) -> Tensor:
    """Expand keys or values to every query head, without a copy, in the one width that the kernel requires."""
    wide = pad(kv_KJx, (0, query_KFID.shape[-1] - kv_KJx.shape[-1]))
    return wide[:, None].expand(-1, query_KFID.shape[1], -1, -1)


def _fused(q_KFID, k_KJD, v_KJU, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    key, value = (_to_group(t, q_KFID) for t in (k_KJD, v_KJU))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_KFID, key, value, 0.0, block.right == 0, scale=scale
    )
    return out[..., : v_KJU.shape[2]], lse


def _fused_backward(grad_KFIU: Tensor, attended: Attended, block: Block, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """attended: tensors of the block, of queries as [K, F, I, ...] and of keys as [K, J, ...]."""
    query, dtype, value_width = attended.query, attended.lse.dtype, attended.value.shape[2]
    key, value = (_to_group(t, query) for t in (attended.key, attended.value))
    grad, out = (pad(t, (0, query.shape[3] - value_width)) for t in (grad_KFIU, attended.out))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, attended.lse.contiguous(), 0.0, block.right == 0, scale=scale
    )
    return dq, dk.sum(1, dtype=dtype), dv.sum(1, dtype=dtype)[..., :value_width]


# ---- FlashAttention of the GPU: all documents in one call ------------------------------------------------------------


def _attend_by_flash(
    query_QHD, key_YKD, value_YKU, blocks, scale: float, uploads: VarlenCache, seen: Seen | None
) -> Seen:
    for call in uploads.calls(blocks, len(query_QHD), len(key_YKD), query_QHD.device):
        queries, keys = call.queries, call.keys
        partial = flash_attention.forward(
            queries.take(query_QHD), keys.take(key_YKD), keys.take(value_YKU), call, scale
        )
        if seen is None and queries.tokens is None:
            seen = partial
        elif queries.tokens is None:
            seen = _merge(*seen, *partial)
        else:
            out, lse = seen or _nothing(query_QHD, value_YKU)
            out, tokens = out.to(lse.dtype), queries.tokens
            out[tokens], lse[tokens] = _merge(out[tokens], lse[tokens], *partial)
            seen = out, lse
    assert seen is not None, "every query sees itself"
    return seen


def _attend_backward_by_flash(
    grad_QHU: Tensor, attended: Attended, blocks: tuple[Block, ...], scale: float, uploads: VarlenCache
) -> tuple[Tensor, Tensor, Tensor]:
    calls = uploads.calls(blocks, len(attended.query), len(attended.key), grad_QHU.device)
    gradients = None
    for call in calls:
        queries, keys = call.queries, call.keys
        sides = (queries, keys, keys, queries, queries)
        taken = Attended(*(segments.take(t) for segments, t in zip(sides, attended, strict=True)))
        parts = flash_attention.backward(queries.take(grad_QHU), taken, call, scale)
        if len(calls) == 1 and queries.tokens is None and keys.tokens is None:
            return parts
        gradients = gradients or _no_gradients(attended)
        for gradient, segments, part in zip(gradients, (queries, keys, keys), parts):
            if segments.tokens is None:
                gradient += part
            else:
                gradient.index_add_(0, segments.tokens, part.to(gradient.dtype))
    return gradients or _no_gradients(attended)
