"""A causal convolution over a few tokens for each channel, with SiLU, over a whole packed row, restarted at every
document.

Shape suffixes: T tokens of the row, X channels, K tokens that an output sees, B and S documents.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, silu

from isoloss.parallel.ops.fused import precise
from isoloss.parallel.ops.row_blocks import slabs
from isoloss.parallel.ops.varlen import VarlenCache


def short_convolution(
    x_TX: Tensor, weight_XK: Tensor, lengths: tuple[int, ...], uploads: VarlenCache | None = None
) -> Tensor:
    """Compute the SiLU of each channel's weighted sum over the last K tokens of its document, [T, X].

    Computes in at least fp32. weight_XK: weights of a channel, that of the token itself last.
    """
    borders = _borders_of(lengths, weight_XK.shape[1])
    if x_TX.device.type != "cpu":
        on_host, uploads = borders, uploads or VarlenCache()
        borders = uploads.once(("borders", lengths, weight_XK.shape[1]), lambda: on_host, x_TX.device)
    return _ShortConvolution.apply(x_TX, weight_XK, borders)


@torch.no_grad()
def convolution_next(x_BX: Tensor, before_BPX: Tensor, weight_XK: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `short_convolution` for the next token of each of B documents, [B, X], and the next `before_BPX`.

    Not differentiable. before_BPX: last P = K - 1 tokens of each document (`last_tokens`).
    """
    window_BKX = torch.cat([before_BPX, x_BX[:, None]], 1)
    taps_KX = _taps(x_BX, weight_XK).flip(0)
    sums_BX = (window_BKX.to(taps_KX.dtype) * taps_KX).sum(1)
    return silu(sums_BX, inplace=True).to(x_BX.dtype), window_BKX[:, 1:]


def last_tokens(x_TX: Tensor, lengths: Sequence[int], count: int) -> Tensor:
    """Return the last `count` tokens of each document, [S, count, X], with zeros before its first token."""
    documents = x_TX[: sum(lengths)].split(list(lengths))
    return torch.stack([pad(document[-count:], (0, 0, max(0, count - len(document)), 0)) for document in documents])


@lru_cache(maxsize=64)
def _borders_of(lengths: tuple[int, ...], width: int) -> Tensor:
    """Return the tokens whose window of `width` tokens reaches over a border of their document, [2, 2, tokens].

    The first dimension is windows into the past and into the future. The second is the index of the token, and the
    number of tokens of its document on this side.
    """
    past, future, start = [], [], 0
    for length in lengths:
        near = range(min(width - 1, length))
        past += [(start + place, place) for place in near]
        future += [(start + length - 1 - place, place) for place in near]
        start += length
    return torch.tensor([past, future], dtype=torch.int64).reshape(2, -1, 2).transpose(1, 2).contiguous()


def _window_sums(x_TX: Tensor, weight_KX: Tensor, borders: Tensor, step: int) -> Tensor:
    """Compute sum_k weight_KX[k] x[t + k step] over the tokens of t's document, [T, X]. step: -1 or 1."""
    total, width, out = len(x_TX), len(weight_KX), torch.empty_like(x_TX, dtype=weight_KX.dtype)
    # Sums over all windows as if the row were one document; sums at borders are replaced below.
    for slab in slabs(x_TX):
        torch.mul(x_TX[slab], weight_KX[0], out=out[slab])
        for k in range(1, width):
            first, last = (max(slab.start, k), slab.stop) if step < 0 else (slab.start, min(slab.stop, total - k))
            if first < last:
                out[first:last].addcmul_(x_TX[first + k * step : last + k * step].to(out.dtype), weight_KX[k])
    tokens, reach = borders
    sums = x_TX[tokens] * weight_KX[0]
    for k in range(1, width):
        near = x_TX[(tokens + k * step).clamp(0, total - 1)] * weight_KX[k]
        sums += torch.where(reach[:, None] >= k, near, 0)
    return out.index_copy_(0, tokens, sums)


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TX, weight_XK, borders):
        ctx.save_for_backward(x_TX, weight_XK, borders)
        return silu(_window_sums(x_TX, _taps(x_TX, weight_XK), borders[0], -1), inplace=True).to(x_TX.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TX):
        x_TX, weight_XK, (past, future) = ctx.saved_tensors
        taps_KX = _taps(x_TX, weight_XK)
        sums_TX = _window_sums(x_TX, taps_KX, past, -1)
        grad_sums_TX = torch.ops.aten.silu_backward(grad_TX.to(sums_TX.dtype), sums_TX)
        grad_x_TX = _window_sums(grad_sums_TX, taps_KX, future, 1).to(x_TX.dtype)

        tokens, reach = past
        at_borders, grad_taps_KX = grad_sums_TX[tokens], torch.zeros_like(taps_KX)
        for k, grad_tap in enumerate(grad_taps_KX):
            near = x_TX[(tokens - k).clamp(0)] * at_borders
            grad_tap += torch.where(reach[:, None] >= k, near, 0).sum(0)
        grad_sums_TX.index_fill_(0, tokens, 0)
        for slab in slabs(x_TX):
            for k, grad_tap in enumerate(grad_taps_KX):
                first = max(slab.start, k)
                if first < slab.stop:
                    grad_tap += (grad_sums_TX[first : slab.stop] * x_TX[first - k : slab.stop - k]).sum(0)
        return grad_x_TX, grad_taps_KX.flip(0).T.to(weight_XK.dtype), None


def _taps(x_TX: Tensor, weight_XK: Tensor) -> Tensor:
    """Return the weights by distance into the past, that of the token itself first, [K, X], in at least fp32."""
    dtype = torch.promote_types(precise(x_TX).dtype, weight_XK.dtype)
    return weight_XK.T.flip(0).to(dtype).contiguous()
