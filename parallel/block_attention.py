"""Attention of the queries of one ring rank to the keys of another, and its gradient, document by document.

What FlashAttention does inside a device (arXiv:2205.14135): an output and the log-sum-exp of its scores are enough to
merge it with others, and with the final log-sum-exp the gradient of each block can be computed alone.

Shape suffixes: Q tokens of the rank that asks, Y of the rank whose keys they are, I and J those of one block, H query
heads, K key/value heads, F query heads for each of them, D width of a query or a key, U of a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from isoloss.parallel.ragged import Uploads
from isoloss.parallel.sequence import chunk_borders

QUERY_BLOCK = 512  # queries whose scores exist at a time, where they have to exist


@dataclass(frozen=True)
class Block:
    """Queries and keys of one document, as slices of what their ranks hold.

    causal: they are the same tokens, and each sees itself and those before it. Else every query sees every key, unless
    `distance`, from the first key to the first query, is given: then causality and window decide for each pair.
    """

    queries: slice
    keys: slice
    causal: bool = False
    distance: int | None = None


@lru_cache(maxsize=256)
def blocks_of(lengths: tuple[int, ...], ring: int, rank: int, owner: int, window: int | None) -> tuple[Block, ...]:
    """What the queries of ring rank `rank` see of the keys of rank `owner`, where documents are cut as by `tokens_of`.

    A rank's two chunks of a document lie symmetrically to its middle. So both see the front chunk, and no more, of an
    owner further outside; of one further inside only the back chunk sees anything, and all of it.
    """
    window = None if window is None or window >= max(lengths) else window
    visible: list[Block] = []
    queries_at = keys_at = 0
    for border in chunk_borders(lengths, ring):
        queries = _pieces(border, rank, queries_at)
        keys = _pieces(border, owner, keys_at)
        queries_at, keys_at = queries[1].stop, keys[1].stop
        all_queries, all_keys = (slice(front.start, back.stop) for front, back in (queries, keys))
        if window is not None:
            visible += _windowed(border, rank, owner, queries, keys, window)
        elif rank == owner:
            visible.append(Block(all_queries, all_keys, causal=True))
        elif owner < rank:
            visible.append(Block(all_queries, keys[0]))
        else:
            visible.append(Block(queries[1], all_keys))
    return tuple(block for block in visible if _size(block.queries) and _size(block.keys))


def _pieces(border: Sequence[int], rank: int, start: int) -> tuple[slice, slice]:
    """Where a rank that holds `start` tokens before this document holds its front and its back chunk."""
    mirror = len(border) - 2 - rank
    middle = start + border[rank + 1] - border[rank]
    return slice(start, middle), slice(middle, middle + border[mirror + 1] - border[mirror])


def _windowed(border: Sequence[int], rank: int, owner: int, queries, keys, window: int) -> list[Block]:
    """The pairs of chunks of a document of which some query sees some key."""
    mirror, visible = len(border) - 2, []
    for query_chunk, query in zip((rank, mirror - rank), queries):
        for key_chunk, key in zip((owner, mirror - owner), keys):
            distance = border[query_chunk] - border[key_chunk]
            farthest, nearest = distance + _size(query) - 1, distance - _size(key) + 1
            if farthest < 0 or nearest >= window:
                continue
            if query_chunk == key_chunk and farthest < window:
                visible.append(Block(query, key, causal=True))
            else:
                visible.append(Block(query, key, distance=None if nearest >= 0 and farthest < window else distance))
    return visible


def _size(piece: slice) -> int:
    return piece.stop - piece.start


def attend(
    query_QHD: Tensor,
    key_YKD: Tensor,
    value_YKU: Tensor,
    blocks: Sequence[Block],
    scale: float,
    window: int | None,
    out_QHU: Tensor,
    lse_QH: Tensor,
    uploads: Uploads,
) -> None:
    """Merge what these blocks give into the output and the log-sum-exp of the scores so far, in place.

    out_QHU, lse_QH: 0 and -inf where a query has seen nothing yet; both in at least fp32.
    uploads: of the row.
    """
    if _fused_on_gpu(query_QHD, value_YKU, blocks):
        _attend_varlen(query_QHD, key_YKD, value_YKU, blocks, scale, out_QHU, lse_QH, uploads)
        return
    kv_heads = key_YKD.shape[1]
    for block in blocks:
        q_KFID = query_QHD[block.queries].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        k_KJD, v_KJU = (t[block.keys].transpose(0, 1) for t in (key_YKD, value_YKU))
        forward = _flash if _fused_on_cpu(q_KFID, block) else _plain
        out_KFIU, lse_KFI = forward(q_KFID, k_KJD, v_KJU, block, scale, window)
        partial = out_KFIU.permute(2, 0, 1, 3).flatten(1, 2), lse_KFI.permute(2, 0, 1).flatten(1, 2)
        out_QHU[block.queries], lse_QH[block.queries] = _merge(out_QHU[block.queries], lse_QH[block.queries], *partial)


def _merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over the union of two sets of keys, from the softmax over each."""
    union = torch.logaddexp(lse, more_lse)
    finite = union.clamp(min=torch.finfo(union.dtype).min)  # of a query that saw nothing in either
    return out * (lse - finite).exp()[..., None] + more_out * (more_lse - finite).exp()[..., None], union


def attend_backward(
    grad_QHU: Tensor,
    query_QHD: Tensor,
    key_YKD: Tensor,
    value_YKU: Tensor,
    out_QHU: Tensor,
    lse_QH: Tensor,
    blocks: Sequence[Block],
    scale: float,
    window: int | None,
    uploads: Uploads,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these blocks add to the gradients of queries, keys and values, in at least fp32.

    out_QHU, lse_QH: of all keys that the queries see, on whichever rank, not of these blocks alone.
    """
    if _fused_on_gpu(query_QHD, value_YKU, blocks):
        tensors = (grad_QHU, query_QHD, key_YKD, value_YKU, out_QHU, lse_QH)
        return _attend_varlen_backward(*tensors, blocks, scale, uploads)
    kv_heads, dtype = key_YKD.shape[1], lse_QH.dtype
    grad_query, grad_key, grad_value = (torch.zeros_like(t, dtype=dtype) for t in (query_QHD, key_YKD, value_YKU))
    for block in blocks:
        q_KFID, out_KFIU, grad_KFIU = (
            t[block.queries].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3) for t in (query_QHD, out_QHU, grad_QHU)
        )
        lse_KFI = lse_QH[block.queries].unflatten(1, (kv_heads, -1)).permute(1, 2, 0)
        k_KJD, v_KJU = (t[block.keys].transpose(0, 1) for t in (key_YKD, value_YKU))
        backward = _flash_backward if _fused_on_cpu(q_KFID, block) else _plain_backward
        dq_KFID, dk_KJD, dv_KJU = backward(grad_KFIU, q_KFID, k_KJD, v_KJU, out_KFIU, lse_KFI, block, scale, window)
        grad_query[block.queries] += dq_KFID.permute(2, 0, 1, 3).flatten(1, 2)
        grad_key[block.keys] += dk_KJD.transpose(0, 1)
        grad_value[block.keys] += dv_KJU.transpose(0, 1)
    return grad_query, grad_key, grad_value


def _statistics(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


# ---- plain matrix products: any device, precision and mask ----------------------------------------------------------


def _visible(block: Block, rows: slice, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which keys [j] each of these queries of the block [i, j] sees; None: all."""
    if not block.causal and block.distance is None:
        return None
    query = torch.arange(rows.start, rows.stop, device=device) + (block.distance or 0)
    distance = query[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) if window is None or block.causal else (distance >= 0) & (distance < window)


def _scores(q_KFiD: Tensor, k_KJD: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    scores_KFiJ = torch.einsum("kfid,kjd->kfij", q_KFiD, k_KJD) * scale
    return scores_KFiJ if visible is None else scores_KFiJ.masked_fill(~visible, -torch.inf)


def _row_blocks(length: int) -> list[slice]:
    return [slice(start, min(start + QUERY_BLOCK, length)) for start in range(0, length, QUERY_BLOCK)]


def _plain(q_KFID, k_KJD, v_KJU, block: Block, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    dtype, keys = _statistics(q_KFID), k_KJD.shape[1]
    q, k, v = (t.to(dtype) for t in (q_KFID, k_KJD, v_KJU))
    outputs, sums = [], []
    for rows in _row_blocks(q.shape[2]):
        scores = _scores(q[:, :, rows], k, scale, _visible(block, rows, keys, window, q.device))
        lse = scores.logsumexp(-1)
        # A query that sees nothing has scores and log-sum-exp of -inf, whose difference would be NaN.
        weights = (scores - lse.clamp(min=torch.finfo(dtype).min)[..., None]).exp()
        outputs.append(torch.einsum("kfij,kju->kfiu", weights, v))
        sums.append(lse)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def _plain_backward(
    grad_KFIU, q_KFID, k_KJD, v_KJU, out_KFIU, lse_KFI, block: Block, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, keys = _statistics(q_KFID), k_KJD.shape[1]
    grad, q, k, v, out = (t.to(dtype) for t in (grad_KFIU, q_KFID, k_KJD, v_KJU, out_KFIU))
    grad_k, grad_v, grads_q = torch.zeros_like(k), torch.zeros_like(v), []
    for rows in _row_blocks(q.shape[2]):
        scores = _scores(q[:, :, rows], k, scale, _visible(block, rows, keys, window, q.device))
        weights = (scores - lse_KFI[:, :, rows, None]).exp()
        delta = (grad[:, :, rows] * out[:, :, rows]).sum(-1, keepdim=True)
        grad_scores = weights * (torch.einsum("kfiu,kju->kfij", grad[:, :, rows], v) - delta) * scale
        grads_q.append(torch.einsum("kfij,kjd->kfid", grad_scores, k))
        grad_k += torch.einsum("kfij,kfid->kjd", grad_scores, q[:, :, rows])
        grad_v += torch.einsum("kfij,kfiu->kju", weights, grad[:, :, rows])
    return torch.cat(grads_q, 2), grad_k, grad_v


# ---- PyTorch's fused kernel of the CPU: the key/value heads are its batch, each seen by F query heads ---------------


def _fused_on_cpu(query: Tensor, block: Block) -> bool:
    return query.is_cpu and block.distance is None


def _to_group(kv_KJx: Tensor, query_KFID: Tensor) -> Tensor:
    """Keys or values for every query head, without a copy; the kernel wants both of one width."""
    wide = pad(kv_KJx, (0, query_KFID.shape[-1] - kv_KJx.shape[-1]))
    return wide[:, None].expand(-1, query_KFID.shape[1], -1, -1)


def _flash(q_KFID, k_KJD, v_KJU, block: Block, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    del window
    key, value = (_to_group(t, q_KFID) for t in (k_KJD, v_KJU))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_KFID, key, value, 0.0, block.causal, scale=scale
    )
    return out[..., : v_KJU.shape[2]], lse


def _flash_backward(
    grad_KFIU, q_KFID, k_KJD, v_KJU, out_KFIU, lse_KFI, block: Block, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    del window
    key, value = (_to_group(t, q_KFID) for t in (k_KJD, v_KJU))
    grad, out = (pad(t, (0, q_KFID.shape[3] - t.shape[3])) for t in (grad_KFIU, out_KFIU))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q_KFID, key, value, out, lse_KFI.contiguous(), 0.0, block.causal, scale=scale
    )
    return dq, dk.sum(1, dtype=lse_KFI.dtype), dv.sum(1, dtype=lse_KFI.dtype)[..., : v_KJU.shape[2]]


# ---- PyTorch's FlashAttention of the GPU: all documents in one call -------------------------------------------------


def _fused_on_gpu(query_QHD: Tensor, value_YKU: Tensor, blocks: Sequence[Block]) -> bool:
    return (
        query_QHD.is_cuda
        and query_QHD.dtype in (torch.bfloat16, torch.float16)
        and query_QHD.shape[2] == value_YKU.shape[2]
        and query_QHD.shape[2] % 8 == 0
        and query_QHD.shape[2] <= 256
        and all(block.distance is None for block in blocks)
        and len({block.causal for block in blocks}) == 1
    )


def _attend_varlen(
    query_QHD, key_YKD, value_YKU, blocks: Sequence[Block], scale: float, out_QHU, lse_QH, uploads: Uploads
) -> None:
    queries = uploads.ragged([block.queries for block in blocks], query_QHD.device)
    keys = uploads.ragged([block.keys for block in blocks], query_QHD.device)
    out, lse_Hq, *_ = torch.ops.aten._flash_attention_forward(
        query_QHD[queries.tokens], key_YKD[keys.tokens], value_YKU[keys.tokens], queries.starts, keys.starts,
        queries.longest, keys.longest, 0.0, blocks[0].causal, False, scale=scale,
    )  # fmt: skip
    out_QHU[queries.tokens], lse_QH[queries.tokens] = _merge(
        out_QHU[queries.tokens], lse_QH[queries.tokens], out, lse_Hq.T.contiguous()
    )


def _attend_varlen_backward(
    grad_QHU, query_QHD, key_YKD, value_YKU, out_QHU, lse_QH, blocks: Sequence[Block], scale: float, uploads: Uploads
) -> tuple[Tensor, Tensor, Tensor]:
    queries = uploads.ragged([block.queries for block in blocks], query_QHD.device)
    keys = uploads.ragged([block.keys for block in blocks], query_QHD.device)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query_QHD.device)
    grads = torch.ops.aten._flash_attention_backward(
        grad_QHU[queries.tokens], query_QHD[queries.tokens], key_YKD[keys.tokens], value_YKU[keys.tokens],
        out_QHU[queries.tokens], lse_QH[queries.tokens].T.contiguous(), queries.starts, keys.starts,
        queries.longest, keys.longest, 0.0, blocks[0].causal, no_dropout, no_dropout.new_zeros(()), scale=scale,
    )  # fmt: skip
    own = (queries.tokens, keys.tokens, keys.tokens)
    grad_query, grad_key, grad_value = (
        torch.zeros_like(whole, dtype=lse_QH.dtype).index_copy(0, tokens, grad.to(lse_QH.dtype))
        for whole, tokens, grad in zip((query_QHD, key_YKD, value_YKU), own, grads)
    )
    return grad_query, grad_key, grad_value
