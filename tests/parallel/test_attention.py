"""Attention over Ulysses x ring ranks equals dense masked attention over packed documents, forward and backward."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.ranks.attention import SCALE, Case, dense_reference, on_slices, on_slices_by_flash

from isoloss.parallel.attention import document_attention, kv_repeats
from isoloss.parallel.ops.block_attention import Heads

HEADS = [
    (8, 8, 2), (8, 4, 2), (8, 2, 2), (8, 1, 2), (6, 3, 2), (6, 2, 2), (6, 6, 2),
    (8, 8, 4), (8, 4, 4), (8, 2, 4), (8, 1, 4), (12, 3, 4), (12, 6, 4), (4, 2, 4),
    (6, 6, 3), (6, 3, 3), (6, 2, 3), (6, 1, 3),
]  # fmt: skip
HEAD_DIM = 6


def random_case(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    seed: int,
    *,
    value_dim: int = HEAD_DIM,
    window: int | None = None,
    sinks: bool = False,
) -> Case:
    random = torch.Generator().manual_seed(seed)
    query, key, value, grad = (
        torch.randn(sum(lengths), count, width, generator=random, dtype=torch.float64)
        for count, width in ((heads, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, value_dim), (heads, value_dim))
    )
    sinks_H = torch.randn(heads, generator=random, dtype=torch.float64) if sinks else None
    return Case(query, key, value, grad, tuple(lengths), window, sinks_H)


def compare(pool, case: Case, ulysses: int, ring: int, on_rank=on_slices) -> None:
    wanted = dense_reference(case)
    ranks = pool.run(ulysses * ring, on_rank, case, ulysses, ring)
    tokens = torch.cat([tokens for tokens, _ in ranks])
    assert tokens.sort().values.tolist() == list(range(len(tokens)))
    for name, whole, parts in zip(("output", "query", "key", "value", "sinks"), wanted, zip(*(of for _, of in ranks))):
        found = sum(parts) if name == "sinks" else torch.cat(parts)[tokens.argsort()]
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


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
    value_dim, window, sinks = [(HEAD_DIM, None, False), (4, 3, False), (HEAD_DIM, 5, True)][seed]
    case = random_case(lengths, heads, kv_heads, seed, value_dim=value_dim, window=window, sinks=sinks)
    compare(pool, case, degree, 1)


GRIDS = [(1, 2), (1, 3), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 2), (3, 2), (2, 3)]


@st.composite
def rows(draw) -> tuple[Case, int, int]:
    """A grid, heads that it admits, and documents of any length: shorter than the grid, and a multiple of nothing."""
    ulysses, ring = draw(st.sampled_from(GRIDS))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * ulysses * draw(st.sampled_from([1, 2]))
    lengths = draw(st.lists(st.one_of(st.integers(1, 3), st.integers(1, 60)), min_size=1, max_size=6))
    lengths.append(-sum(lengths) % (ulysses * ring) or ulysses * ring)  # padding is a document
    window = draw(st.one_of(st.none(), st.integers(1, 30)))
    value_dim = draw(st.sampled_from([HEAD_DIM, 4]))
    seed = draw(st.integers(0, 2**31))
    case = random_case(lengths, heads, kv_heads, seed, value_dim=value_dim, window=window, sinks=draw(st.booleans()))
    return case, ulysses, ring


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=rows())
def test_a_grid_of_ranks_equals_dense_attention(pool, row):
    compare(pool, *row)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("ulysses", "ring"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_a_grid_of_gpus_equals_dense_attention(pool, ulysses, ring, seed):
    """Wider queries than values; with a window; and with sinks as well."""
    lengths = document_lengths(ulysses * ring, seed)
    value_dim, window, sinks = [(4, None, True), (HEAD_DIM, 5, True)][seed - 1]
    case = random_case(lengths, 8, 4, seed, value_dim=value_dim, window=window, sinks=sinks)
    compare(pool, case, ulysses, ring, on_slices_by_flash)


def test_a_ring_over_documents_of_many_blocks_of_queries(pool):
    """Longer than the blocks of queries in which masked scores are made, with a window that ends in another's chunk."""
    compare(pool, random_case([2500, 3, 1501], 2, 1, 0, window=700, sinks=True), 1, 2)


@pytest.mark.parametrize("window", [None, 1, 7, 600, 2000])
@pytest.mark.parametrize("sinks", [False, True])
def test_documents_of_many_blocks_of_queries(window, sinks):
    """Longer than a block, than the window and shorter, forward and backward."""
    lengths = (1200, 3, 517)
    case = random_case(list(lengths), 2, 1, 0, window=window, sinks=sinks)
    q, k, v = (t.clone().requires_grad_() for t in (case.query_WHD, case.key_WKD, case.value_WKU))
    s = None if case.sinks_H is None else case.sinks_H.clone().requires_grad_()
    out = document_attention(q, k, v, lengths, Heads(SCALE, window, s))
    (case.grad_WHU * out).sum().backward()
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
