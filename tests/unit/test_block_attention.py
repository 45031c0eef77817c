"""The blocks of all pairs of ring ranks, merged in one process, are dense attention; so is the call that a GPU gets."""

import pytest
import torch
from support.attention import Case, dense_reference, round_the_ring
from torch import Tensor

from isoloss.parallel import block_attention
from isoloss.parallel.block_attention import blocks_of

LENGTHS = (1, 37, 2, 90, 5, 9)  # 144 tokens


def make_case(window: int | None) -> Case:
    random = torch.Generator().manual_seed(2)
    query, key, value, grad = (
        torch.randn(sum(LENGTHS), heads, 8, generator=random, dtype=torch.float64) for heads in (6, 2, 2, 6)
    )
    return Case(query, key, value, grad, LENGTHS, window)


@pytest.mark.parametrize("window", [None, 1, 20, 60, 500])
@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_all_pairs_of_ranks_are_dense_attention(ring, window):
    case = make_case(window)
    for found, wanted in zip(round_the_ring(case, ring), dense_reference(case), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_without_a_window_every_rank_has_the_same_pairs_to_look_at():
    def pairs(rank: int, owner: int) -> int:
        return sum(
            (b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start)
            for b in blocks_of((4096,), 4, rank, owner, None)
        )

    for step in range(1, 4):
        assert len({pairs(rank, (rank - step) % 4) for rank in range(4)}) == 1


def test_plain_matrix_products_do_what_the_fused_kernel_does(monkeypatch):
    case = make_case(None)
    fused = round_the_ring(case, 4)
    monkeypatch.setattr(block_attention, "_fused_on_cpu", lambda *_: False)
    monkeypatch.setattr(block_attention, "QUERY_BLOCK", 16)
    for found, wanted in zip(round_the_ring(case, 4), fused, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def segments(starts: Tensor) -> list[slice]:
    return [slice(a, b) for a, b in zip(starts.tolist(), starts[1:].tolist())]


def softmax_of(query: Tensor, key: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Scores [H, t, j] of one segment, hidden ones -inf, and the keys for every query head."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = torch.einsum("thd,jhd->htj", query, key) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1) if causal else torch.zeros(scores.shape[1:]).bool()
    return scores.masked_fill(hidden, -torch.inf), key


def flash_forward(q, k, v, starts_q, starts_k, longest_q, longest_k, dropout, causal, debug, *, scale):
    """torch.ops.aten._flash_attention_forward over ragged segments, as FlashAttention 2 documents it."""
    assert starts_q.dtype == starts_k.dtype == torch.int32 and dropout == 0.0 and not debug
    assert longest_q == starts_q.diff().max() and longest_k == starts_k.diff().max()
    outs, sums = [], []
    for of_q, of_k in zip(segments(starts_q), segments(starts_k), strict=True):
        scores, _ = softmax_of(q[of_q], k[of_k], causal, scale)
        value = v[of_k].repeat_interleave(q.shape[1] // v.shape[1], 1)
        outs.append(torch.einsum("htj,jhe->the", scores.softmax(-1), value))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1), None, None, None


def flash_backward(
    grad, q, k, v, out, lse, starts_q, starts_k, longest_q, longest_k, dropout, causal, seed, offset, *, scale
):
    del longest_q, longest_k, seed, offset
    assert dropout == 0.0
    grads = [torch.zeros_like(t) for t in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    for of_q, of_k in zip(segments(starts_q), segments(starts_k), strict=True):
        scores, key = softmax_of(q[of_q], k[of_k], causal, scale)
        weights = (scores - lse[:, of_q, None]).exp()
        value = v[of_k].repeat_interleave(group, 1)
        delta = (grad[of_q] * out[of_q]).sum(-1).T[..., None]
        of_scores = weights * (torch.einsum("the,jhe->htj", grad[of_q], value) - delta) * scale
        grads[0][of_q] += torch.einsum("htj,jhd->thd", of_scores, key)
        grads[1][of_k] += torch.einsum("htj,thd->jhd", of_scores, q[of_q]).unflatten(1, (-1, group)).sum(2)
        grads[2][of_k] += torch.einsum("htj,the->jhe", weights, grad[of_q]).unflatten(1, (-1, group)).sum(2)
    return grads


@pytest.mark.parametrize("ring", [2, 4])
def test_what_a_gpu_is_asked_is_dense_attention(monkeypatch, ring):
    """The one call for all documents, its operators played by plain products."""
    case = make_case(None)
    monkeypatch.setattr(block_attention, "_fused_on_gpu", lambda _q, _v, blocks: bool(blocks))
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    for found, wanted in zip(round_the_ring(case, ring), dense_reference(case), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
