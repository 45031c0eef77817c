"""PyTorch's two operators of FlashAttention over ragged segments, by plain products, in any precision on a CPU.

As FlashAttention 2 documents them: segments are aligned at their ends, -1 is no limit, key/value heads are shared by
groups of query heads. What the kernels refuse fails here.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from isoloss.parallel.ops import flash_attention


@contextlib.contextmanager
def installed() -> Iterator[mock.Mock]:
    """Here the kernels take all attention. Gives the forward operator, which knows how it was called."""
    forward = mock.Mock(side_effect=_forward)
    with (
        mock.patch.object(flash_attention, "takes", lambda query: True),
        mock.patch.object(torch.ops.aten, "_flash_attention_forward", forward),
        mock.patch.object(torch.ops.aten, "_flash_attention_backward", _backward),
    ):
        yield forward


def _segments(starts: Tensor) -> list[slice]:
    return [slice(a, b) for a, b in zip(starts.tolist(), starts[1:].tolist())]


def _check(q, k, v, starts_q, starts_k, longest_q, longest_k, dropout, causal, left, right) -> None:
    assert q.shape[2] == k.shape[2] == v.shape[2] <= 256 and q.shape[2] % 8 == 0
    assert starts_q.dtype == starts_k.dtype == torch.int32 and dropout == 0.0
    assert longest_q == starts_q.diff().max() and longest_k == starts_k.diff().max()
    assert starts_q[-1] == len(q) and starts_k[-1] == len(k) == len(v)
    assert causal == (left == -1 and right == 0)


def _scores(query: Tensor, key: Tensor, scale: float, left: int, right: int) -> tuple[Tensor, Tensor]:
    """Scores [H, i, j] of one segment, hidden ones -inf, and the keys for every query head."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = torch.einsum("ihd,jhd->hij", query, key) * scale
    ahead = torch.arange(len(key)) - len(key) - (torch.arange(len(query)) - len(query))[:, None]
    hidden = ((ahead > right) if right >= 0 else torch.zeros_like(ahead).bool()) | ((ahead < -left) & (left >= 0))
    assert not hidden.all(1).any(), "the kernel's log-sum-exp of a query that sees nothing is +inf"
    return scores.masked_fill(hidden, -torch.inf), key


def _forward(
    q, k, v, starts_q, starts_k, longest_q, longest_k, dropout, causal, debug,
    *, scale, window_size_left, window_size_right,
):  # fmt: skip
    limits = window_size_left, window_size_right
    _check(q, k, v, starts_q, starts_k, longest_q, longest_k, dropout, causal, *limits)
    assert not debug
    outs, sums = [], []
    for of_q, of_k in zip(_segments(starts_q), _segments(starts_k), strict=True):
        scores, _ = _scores(q[of_q], k[of_k], scale, *limits)
        value = v[of_k].repeat_interleave(q.shape[1] // v.shape[1], 1)
        outs.append(torch.einsum("hij,jhe->ihe", scores.softmax(-1), value))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1), None, None, None


def _backward(
    grad, q, k, v, out, lse, starts_q, starts_k, longest_q, longest_k, dropout, causal, seed, offset,
    *, scale, window_size_left, window_size_right,
):  # fmt: skip
    del seed, offset
    limits = window_size_left, window_size_right
    _check(q, k, v, starts_q, starts_k, longest_q, longest_k, dropout, causal, *limits)
    assert lse.is_contiguous() and lse.shape == (q.shape[1], len(q)) and grad.shape == out.shape == q.shape
    grads = [torch.zeros_like(t) for t in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    for of_q, of_k in zip(_segments(starts_q), _segments(starts_k), strict=True):
        scores, key = _scores(q[of_q], k[of_k], scale, *limits)
        weights = (scores - lse[:, of_q, None]).exp()
        value = v[of_k].repeat_interleave(group, 1)
        delta = (grad[of_q] * out[of_q]).sum(-1).T[..., None]
        of_scores = weights * (torch.einsum("ihe,jhe->hij", grad[of_q], value) - delta) * scale
        grads[0][of_q] += torch.einsum("hij,jhd->ihd", of_scores, key)
        grads[1][of_k] += torch.einsum("hij,ihd->jhd", of_scores, q[of_q]).unflatten(1, (-1, group)).sum(2)
        grads[2][of_k] += torch.einsum("hij,ihe->jhe", weights, grad[of_q]).unflatten(1, (-1, group)).sum(2)
    return grads
