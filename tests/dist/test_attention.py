"""Ulysses attention over packed documents equals dense masked attention, forward and backward, for any grouping."""

import pytest
import torch
from worlds.attention import dense_reference, on_slices

from isoloss.parallel.attention import kv_repeats

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
    lengths = document_lengths(degree, seed)
    borders = {sum(lengths[:i]) for i in range(len(lengths) + 1)}
    assert not set(range(8, 8 * degree, 8)) <= borders  # a document crosses the border of a shard
    random = torch.Generator().manual_seed(seed)
    query, key, value, grad = (
        torch.randn(8 * degree, count, HEAD_DIM, generator=random, dtype=torch.float64)
        for count in (heads, kv_heads, kv_heads, heads)
    )
    wanted = dense_reference(query, key, value, lengths, 0.7, grad)
    ranks = pool.run(degree, on_slices, query, key, value, lengths, 0.7, grad)
    for name, whole, parts in zip(("output", "query", "key", "value"), wanted, zip(*ranks)):
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


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
