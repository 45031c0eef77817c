"""Attention of the queries of one ring rank to the keys of another, and its gradient: by FlashAttention on a GPU, else
document by document.

What FlashAttention does inside a device (arXiv:2205.14135): an output and the log-sum-exp of its scores are enough to
merge it with others, and with the final log-sum-exp the gradient of each block can be computed alone.

Shape suffixes: Q tokens of the rank that asks, Y of the rank whose keys they are, I and J those of one block, H query
heads, K key/value heads, F query heads for each of them, D width of a query or a key, U of a value.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from isoloss.parallel.ops import flash_attention
from isoloss.parallel.ops.fused import Fused
from isoloss.parallel.ops.mask_blocks import Block, size_of
from isoloss.parallel.ops.varlen import VarlenCache

QUERY_BLOCK = 512  # queries whose scores exist at a time, where they have to exist
Seen = tuple[Tensor, Tensor]  # the output [Q, H, U] for the keys so far, and the log-sum-exp of their scores [Q, H]


def attend(
    query_QHD: Tensor,
    key_YKD: Tensor,
    value_YKU: Tensor,
    blocks: tuple[Block, ...],
    scale: float,
    uploads: VarlenCache,
    seen: Seen | None,
    *,
    flash: bool = True,
) -> Seen:
    """Merge what these blocks give into what the queries saw before, which is used up.

    seen: None: nothing; then every query is in some block. In at least fp32, but for what one call of FlashAttention
        gives, whose output has the precision of the queries.
    uploads: of the row.
    flash: whether FlashAttention may compute it, where there is a kernel.
    """
    if flash and flash_attention.takes(query_QHD):
        return _attend_by_flash(query_QHD, key_YKD, value_YKU, blocks, scale, uploads, seen)
    out_QHU, lse_QH = seen or _nothing(query_QHD, value_YKU)
    kv_heads = key_YKD.shape[1]
    for block in blocks:
        q_KFID = query_QHD[block.queries].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        k_KJD, v_KJU = (t[block.keys].transpose(0, 1) for t in (key_YKD, value_YKU))
        forward = _flash if _fused_on_cpu(q_KFID, block) else _plain
        out_KFIU, lse_KFI = forward(q_KFID, k_KJD, v_KJU, block, scale)
        partial = out_KFIU.permute(2, 0, 1, 3).flatten(1, 2), lse_KFI.permute(2, 0, 1).flatten(1, 2)
        out_QHU[block.queries], lse_QH[block.queries] = _merge(out_QHU[block.queries], lse_QH[block.queries], *partial)
    return out_QHU, lse_QH


def _nothing(query_QHD: Tensor, value_YKU: Tensor) -> Seen:
    dtype = _statistics(query_QHD)
    out = query_QHD.new_zeros((*query_QHD.shape[:2], value_YKU.shape[2]), dtype=dtype)
    return out, query_QHD.new_full(query_QHD.shape[:2], -torch.inf, dtype=dtype)


def _union(lse: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of two sets of keys: the log-sum-exp of both, and the share that each has of the softmax over both."""
    union = torch.logaddexp(lse, more_lse)
    return union, (lse - union).exp(), (more_lse - union).exp()


def _weighted(out: Tensor, share: Tensor, more_out: Tensor, more_share: Tensor) -> Tensor:
    return out * share[..., None] + more_out * more_share[..., None]


union, weighted = Fused(_union), Fused(_weighted)


def _merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> Seen:
    """The softmax over the union of two sets of keys, from the softmax over each."""
    of_both, share, more_share = union(lse, more_lse)
    return weighted(out, share, more_out, more_share), of_both


def attend_backward(
    grad_QHU: Tensor,
    query_QHD: Tensor,
    key_YKD: Tensor,
    value_YKU: Tensor,
    out_QHU: Tensor,
    lse_QH: Tensor,
    blocks: tuple[Block, ...],
    scale: float,
    uploads: VarlenCache,
    *,
    flash: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these blocks add to the gradients of queries, keys and values: in at least fp32, but for those of one call
    of FlashAttention that covers all tokens.

    out_QHU, lse_QH: of all keys that the queries see, on whichever rank, not of these blocks alone.
    """
    if flash and flash_attention.takes(query_QHD):
        tensors = (grad_QHU, query_QHD, key_YKD, value_YKU, out_QHU, lse_QH)
        return _attend_backward_by_flash(*tensors, blocks, scale, uploads)
    kv_heads, dtype = key_YKD.shape[1], lse_QH.dtype
    grad_query, grad_key, grad_value = _no_gradients(query_QHD, key_YKD, value_YKU, dtype)
    for block in blocks:
        q_KFID, out_KFIU, grad_KFIU = (
            t[block.queries].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3) for t in (query_QHD, out_QHU, grad_QHU)
        )
        lse_KFI = lse_QH[block.queries].unflatten(1, (kv_heads, -1)).permute(1, 2, 0)
        k_KJD, v_KJU = (t[block.keys].transpose(0, 1) for t in (key_YKD, value_YKU))
        backward = _flash_backward if _fused_on_cpu(q_KFID, block) else _plain_backward
        dq_KFID, dk_KJD, dv_KJU = backward(grad_KFIU, q_KFID, k_KJD, v_KJU, out_KFIU, lse_KFI, block, scale)
        grad_query[block.queries] += dq_KFID.permute(2, 0, 1, 3).flatten(1, 2)
        grad_key[block.keys] += dk_KJD.transpose(0, 1)
        grad_value[block.keys] += dv_KJU.transpose(0, 1)
    return grad_query, grad_key, grad_value


def _no_gradients(
    query_QHD: Tensor, key_YKD: Tensor, value_YKU: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.zeros_like(t, dtype=dtype) for t in (query_QHD, key_YKD, value_YKU))
    return query, key, value


def _statistics(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


# ---- plain matrix products: any device, precision and mask ----------------------------------------------------------


def _visible(block: Block, rows: slice, queries: int, keys: int, device: torch.device) -> tuple[slice, Tensor | None]:
    """The keys that some of these queries of the block see, and which of them each sees, [i, j]; None: all."""
    ahead = keys - queries  # both are aligned at their ends
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


def _plain_backward(
    grad_KFIU, q_KFID, k_KJD, v_KJU, out_KFIU, lse_KFI, block: Block, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, queries, keys = _statistics(q_KFID), q_KFID.shape[2], k_KJD.shape[1]
    grad, q, k, v, out = (t.to(dtype) for t in (grad_KFIU, q_KFID, k_KJD, v_KJU, out_KFIU))
    grad_k, grad_v, grads_q = torch.zeros_like(k), torch.zeros_like(v), []
    for rows in _row_blocks(queries):
        reached, visible = _visible(block, rows, queries, keys, q.device)
        scores = _scores(q[:, :, rows], k[:, reached], scale, visible)
        weights = (scores - lse_KFI[:, :, rows, None]).exp()
        delta = (grad[:, :, rows] * out[:, :, rows]).sum(-1, keepdim=True)
        grad_scores = weights * (torch.einsum("kfiu,kju->kfij", grad[:, :, rows], v[:, reached]) - delta) * scale
        grads_q.append(torch.einsum("kfij,kjd->kfid", grad_scores, k[:, reached]))
        grad_k[:, reached] += torch.einsum("kfij,kfid->kjd", grad_scores, q[:, :, rows])
        grad_v[:, reached] += torch.einsum("kfij,kfiu->kju", weights, grad[:, :, rows])
    return torch.cat(grads_q, 2), grad_k, grad_v


# ---- PyTorch's fused kernel of the CPU: the key/value heads are its batch, each seen by F query heads ---------------


def _fused_on_cpu(query_KFID: Tensor, block: Block) -> bool:
    """The kernel has no window, and its causal mask is aligned at the beginning."""
    square = size_of(block.queries) == size_of(block.keys)
    return query_KFID.is_cpu and block.left is None and (block.right is None or (block.right == 0 and square))


def _to_group(kv_KJx: Tensor, query_KFID: Tensor) -> Tensor:
    """Keys or values for every query head, without a copy; the kernel wants both of one width."""
    wide = pad(kv_KJx, (0, query_KFID.shape[-1] - kv_KJx.shape[-1]))
    return wide[:, None].expand(-1, query_KFID.shape[1], -1, -1)


def _flash(q_KFID, k_KJD, v_KJU, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    key, value = (_to_group(t, q_KFID) for t in (k_KJD, v_KJU))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_KFID, key, value, 0.0, block.right == 0, scale=scale
    )
    return out[..., : v_KJU.shape[2]], lse


def _flash_backward(
    grad_KFIU, q_KFID, k_KJD, v_KJU, out_KFIU, lse_KFI, block: Block, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    key, value = (_to_group(t, q_KFID) for t in (k_KJD, v_KJU))
    grad, out = (pad(t, (0, q_KFID.shape[3] - t.shape[3])) for t in (grad_KFIU, out_KFIU))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q_KFID, key, value, out, lse_KFI.contiguous(), 0.0, block.right == 0, scale=scale
    )
    return dq, dk.sum(1, dtype=lse_KFI.dtype), dv.sum(1, dtype=lse_KFI.dtype)[..., : v_KJU.shape[2]]


# ---- FlashAttention of the GPU: all documents in one call ------------------------------------------------------------


def _attend_by_flash(
    query_QHD, key_YKD, value_YKU, blocks, scale: float, uploads: VarlenCache, seen: Seen | None
) -> Seen:
    for call in uploads.calls(blocks, len(query_QHD), len(key_YKD), query_QHD.device):
        asking, theirs = call.queries, call.keys
        found = flash_attention.forward(
            asking.take(query_QHD), theirs.take(key_YKD), theirs.take(value_YKU), call, scale
        )
        if seen is None and asking.tokens is None:
            seen = found
        elif asking.tokens is None:
            seen = _merge(*seen, *found)
        else:
            out, lse = seen or _nothing(query_QHD, value_YKU)
            out, tokens = out.to(lse.dtype), asking.tokens
            out[tokens], lse[tokens] = _merge(out[tokens], lse[tokens], *found)
            seen = out, lse
    assert seen is not None, "every query sees itself"
    return seen


def _attend_backward_by_flash(
    grad_QHU, query_QHD, key_YKD, value_YKU, out_QHU, lse_QH, blocks, scale: float, uploads: VarlenCache
) -> tuple[Tensor, Tensor, Tensor]:
    calls = uploads.calls(blocks, len(query_QHD), len(key_YKD), query_QHD.device)
    whole = None
    for call in calls:
        asking, theirs = call.queries, call.keys
        parts = flash_attention.backward(
            asking.take(grad_QHU), asking.take(query_QHD), theirs.take(key_YKD), theirs.take(value_YKU),
            asking.take(out_QHU), asking.take(lse_QH), call, scale,
        )  # fmt: skip
        if len(calls) == 1 and asking.tokens is None and theirs.tokens is None:
            return parts
        whole = whole or _no_gradients(query_QHD, key_YKD, value_YKU, lse_QH.dtype)
        for gradient, ragged, part in zip(whole, (asking, theirs, theirs), parts):
            if ragged.tokens is None:
                gradient += part
            else:
                gradient.index_add_(0, ragged.tokens, part.to(gradient.dtype))
    return whole or _no_gradients(query_QHD, key_YKD, value_YKU, lse_QH.dtype)
