"""Ulysses attention over packed documents equals dense masked attention, forward and backward, for any grouping."""

import pytest
import torch
from worlds.attention import SCALE, Case, dense_reference, on_slices

from isoloss.parallel.attention import Heads, document_attention, kv_repeats

HEADS = [
    (8, 8, 2), (8, 4, 2), (8, 2, 2), (8, 1, 2), (6, 3, 2), (6, 2, 2), (6, 6, 2),
    (8, 8, 4), (8, 4, 4), (8, 2, 4), (8, 1, 4), (12, 3, 4), (12, 6, 4), (4, 2, 4),
    (6, 6, 3), (6, 3, 3), (6, 2, 3), (6, 1, 3),
]  # fmt: skip
HEAD_DIM = 6


def document_lengths(degree: int, seed: int) -> list[int]:
    """Documents of a row of 8 tokens a rank: some of one token, and one that lies on every rank but the outer ends."""
    total, random = 8 * degree, torch.Generator().manual_seed(seed)
    if seed == 0:
        return [1, 1, 2, total - 6, 1, 1]
    lengths: list[int] = []
    while sum(lengths) < total:
        length = int(torch.randint(1, 9, (), generator=random))
        lengths.append(min(length, total - sum(lengths)))
    return lengths


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("heads", "kv_heads", "degree"), HEADS)
def test_ulysses_attention_equals_dense_attention(pool, heads, kv_heads, degree, seed):
    """Plain; with a window and wider queries than values; and with sinks as well."""
    lengths = document_lengths(degree, seed)
    borders = {sum(lengths[:i]) for i in range(len(lengths) + 1)}
    assert not set(range(8, 8 * degree, 8)) <= borders  # a document crosses the border of a shard
    random = torch.Generator().manual_seed(seed)
    value_dim, window, sinks = [(HEAD_DIM, None, False), (4, 3, False), (HEAD_DIM, 5, True)][seed]
    query, key, value, grad = (
        torch.randn(8 * degree, count, width, generator=random, dtype=torch.float64)
        for count, width in ((heads, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, value_dim), (heads, value_dim))
    )
    sinks_H = torch.randn(heads, generator=random, dtype=torch.float64) if sinks else None
    case = Case(query, key, value, grad, tuple(lengths), window, sinks_H)
    wanted = dense_reference(case)
    ranks = pool.run(degree, on_slices, case)
    for name, whole, parts in zip(("output", "query", "key", "value", "sinks"), wanted, zip(*ranks)):
        found = sum(parts) if name == "sinks" else torch.cat(parts)
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("window", [None, 1, 7, 600, 2000])
@pytest.mark.parametrize("sinks", [False, True])
def test_documents_of_many_blocks_of_queries(window, sinks):
    """Longer than a block, than the window and shorter, forward and backward."""
    lengths = (1200, 3, 517)
    random = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(sum(lengths), count, 4, generator=random, dtype=torch.float64) for count in (2, 1, 1, 2)
    )
    sinks_H = torch.randn(2, generator=random, dtype=torch.float64) if sinks else None
    case = Case(query, key, value, grad, lengths, window, sinks_H)
    q, k, v = (t.clone().requires_grad_() for t in (query, key, value))
    s = None if sinks_H is None else sinks_H.clone().requires_grad_()
    out = document_attention(q, k, v, lengths, Heads(SCALE, window, s))
    (grad * out).sum().backward()
    found = [out, q.grad, k.grad, v.grad] + ([] if s is None else [s.grad])
    for a, b in zip(found, dense_reference(case), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_documents_of_the_cases_have_single_tokens():
    assert all(any(1 in document_lengths(degree, seed) for seed in range(3)) for degree in (2, 3, 4))


@pytest.mark.parametrize(("heads", "kv_heads", "degree"), HEADS)
def test_repeated_key_value_heads_put_each_query_head_beside_its_own(heads, kv_heads, degree):
    """By head numbers alone; and no more copies than one for each query head."""
    repeats = kv_repeats(heads, kv_heads, degree)
    copies = [head for head in range(kv_heads) for _ in range(repeats)]
    assert len(copies) <= max(heads, kv_heads) and len(copies) % degree == 0
    if kv_heads % degree == 0 or degree % kv_heads == 0:
        assert len(copies) == max(kv_heads, degree)  # none, or one a rank
    on_rank = len(copies) // degree
    for query in range(heads):
        rank, local = divmod(query, heads // degree)
        grouped = heads // degree // on_rank
        assert copies[rank * on_rank + local // grouped] == query // (heads // kv_heads)
