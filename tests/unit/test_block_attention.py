"""The blocks of all pairs of ring ranks, merged in one process, are dense attention; so is the call that a GPU gets."""

import contextlib
from itertools import accumulate

import pytest
import torch
from doubles import flash_attention
from hypothesis import given as given_all
from hypothesis import settings
from hypothesis import strategies as st
from support.models.compiled_kernels import as_on_a_gpu
from support.ranks.attention import SCALE, Case, dense_reference, round_the_ring

from isoloss.parallel.ops import block_attention
from isoloss.parallel.ops.block_attention import Heads, attend
from isoloss.parallel.ops.mask_blocks import blocks_of
from isoloss.parallel.ops.prefix_tree import PrefixTree
from isoloss.parallel.ops.varlen import VarlenCache

LENGTHS = (1, 37, 2, 90, 5, 9)  # 144 tokens


def make_case(
    window: int | None,
    width: int = 8,
    value_width: int = 8,
    lengths: tuple[int, ...] = LENGTHS,
    parents: tuple[int, ...] = (),
) -> Case:
    random = torch.Generator().manual_seed(2)
    query, key, value, grad = (
        torch.randn(sum(lengths), heads, of, generator=random, dtype=torch.float64)
        for heads, of in ((6, width), (2, width), (2, value_width), (6, value_width))
    )
    return Case(query, key, value, grad, lengths, window, parents=parents)


@pytest.mark.parametrize("window", [None, 1, 20, 60, 500])
@pytest.mark.parametrize("ring", [1, 2, 3, 4, 8])
def test_all_pairs_of_ranks_are_dense_attention(ring, window):
    case = make_case(window)
    for found, wanted in zip(round_the_ring(case, ring), dense_reference(case), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@st.composite
def forests(draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """lengths and parents of up to 8 pieces; the last piece makes it 8 times something, as padding does."""
    lengths, parents, path = [], [], []
    for piece in range(draw(st.integers(1, 7))):
        depth = draw(st.integers(0, len(path)))
        path = [*path[:depth], piece]
        parents.append(path[-2] if depth else -1)
        lengths.append(draw(st.integers(1, 24)))
    return (*lengths, 8 - sum(lengths) % 8), (*parents, -1)


@settings(max_examples=120, deadline=None)
@given_all(forests(), st.sampled_from([None, 1, 3, 9, 40]), st.sampled_from([1, 2, 4]), st.booleans())
def test_documents_that_share_what_they_begin_with_are_dense_attention(forest, window, ring, on_gpu):
    """Trees of any depth, cut over a ring; blocks on a CPU, and the calls that a GPU gets."""
    lengths, parents = forest
    case = make_case(window, lengths=lengths, parents=parents)
    with flash_attention.installed() if on_gpu else contextlib.nullcontext():
        found = round_the_ring(case, ring)
    for one, other in zip(found, dense_reference(case), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_group_that_shares_its_prompt_takes_two_calls():
    """Whatever the number of completions and of groups: each piece within itself, and completions to prompts."""
    lengths, parents = (9, 3, 4, 5, 7, 2, 2), (-1, 0, 0, 0, -1, 4, 4)
    case = make_case(None, lengths=lengths, parents=parents)
    with flash_attention.installed() as forward:
        found = round_the_ring(case, 1)
    assert forward.call_count == 2
    for one, other in zip(found, dense_reference(case), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_every_rank_sees_as_much_of_shared_prompts():
    forest = PrefixTree((64, 16, 32, 48), (-1, 0, 0, 0))
    sizes = [
        sum(
            (b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start)
            for owner in range(4)
            for b in blocks_of(forest, 4, rank, owner, None)
            if b.level
        )
        for rank in range(4)
    ]
    assert sizes == [64 * 96 // 4] * 4


def test_pieces_come_depth_first():
    forest = PrefixTree((5, 2, 3, 4, 6, 1), (-1, 0, 1, 0, -1, 4))
    assert forest.offsets == (0, 5, 7, 5, 0, 6) and forest.depths == (0, 1, 2, 1, 0, 1)
    assert forest.ends == (4, 3, 3, 4, 6, 6) and forest.longest == 10 and forest.shares
    assert not PrefixTree((5, 2)).shares and not PrefixTree((5, 2), (-1, -1)).shares
    assert PrefixTree((5, 2)).ends == PrefixTree((5, 2), (-1, -1)).ends == (1, 2)
    with pytest.raises(AssertionError, match="depth first"):
        PrefixTree((5, 2, 3, 4), (-1, 0, -1, 1))


def test_without_a_window_every_rank_has_the_same_pairs_to_look_at():
    def pairs(rank: int, owner: int) -> int:
        return sum(
            (b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start)
            for b in blocks_of(PrefixTree((4096,)), 4, rank, owner, None)
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


@pytest.mark.parametrize("window", [None, 1, 20, 60, 500])
@pytest.mark.parametrize("ring", [1, 2, 3, 4, 8])
def test_what_a_gpu_is_asked_is_dense_attention(ring, window):
    """Calls for all documents, also of heads whose widths differ and are no multiple of 8."""
    for case in (make_case(window), make_case(window, width=11, value_width=6)):
        with flash_attention.installed():
            found = round_the_ring(case, ring)
        for one, other in zip(found, dense_reference(case), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 20])
def test_a_whole_row_is_one_call_and_nothing_is_copied_for_it(window):
    case = make_case(window)
    with flash_attention.installed() as forward:
        out, _ = attend(
            case.query_WHD,
            case.key_WKD,
            case.value_WKU,
            blocks_of(PrefixTree(LENGTHS), 1, 0, 0, window),
            Heads(SCALE),
            VarlenCache(),
            None,
        )
    (call,) = forward.call_args_list
    assert call.args[0] is case.query_WHD and call.args[2] is case.value_WKU
    assert call.args[3].tolist() == call.args[4].tolist() == [0, *accumulate(LENGTHS)]
    assert call.kwargs["window_size_left"] == (-1 if window is None else 19)
    torch.testing.assert_close(out, dense_reference(case)[0], rtol=1e-12, atol=1e-12)


def test_a_window_of_a_ring_takes_few_calls_whatever_the_number_of_documents():
    """One for its own chunks, and one for every other position that the end of a chunk of keys can have."""
    case = make_case(20)
    with flash_attention.installed() as forward:
        round_the_ring(case, 2)
    assert forward.call_count <= 2 * (1 + 2 * len(LENGTHS))
    own = blocks_of(PrefixTree(LENGTHS), 2, 0, 0, 20)
    assert len(VarlenCache().calls(own, 72, 72, torch.device("cpu"))) < len(own)


def test_without_a_kernel_or_where_it_is_not_wanted_blocks_of_queries_do():
    case = make_case(20)
    with flash_attention.installed() as forward:
        found = round_the_ring(case, 2, flash=False)
    assert not forward.called
    for one, other in zip(found, dense_reference(case), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_two_sets_of_keys_are_merged_by_two_kernels():
    """Compiled here for the CPU; in fp32, with the output of a kernel in bf16, against fp64."""
    random = torch.Generator().manual_seed(4)
    lse, more = (torch.randn(33, 4, generator=random) * 9 for _ in range(2))
    out, more_out = torch.randn(33, 4, 16, generator=random), torch.randn(33, 4, 16, generator=random).bfloat16()
    shares = block_attention.union.op_by_op(lse.double(), more.double())
    torch.testing.assert_close(shares[0], (lse.double().exp() + more.double().exp()).log())
    torch.testing.assert_close(shares[1] + shares[2], torch.ones(33, 4, dtype=torch.float64))
    for kernel, given in ((block_attention.union, (lse, more)), (block_attention.weighted, (out, lse, more_out, more))):
        exact = kernel.op_by_op(*(t.double() for t in given))
        found, count = as_on_a_gpu(kernel, *given)
        assert count == 1
        for one, other in zip(*((of if isinstance(of, tuple) else (of,)) for of in (found, exact)), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_scores_never_exist_for_more_than_a_block_of_queries_and_what_they_see(monkeypatch):
    """So memory does not grow with the square of a document, nor work where there is a window."""
    case, scores = make_case(20), block_attention._scores
    seen: list[tuple[int, int]] = []

    def noted(query, key, scale, visible):
        seen.append((query.shape[2], key.shape[1]))
        return scores(query, key, scale, visible)

    monkeypatch.setattr(block_attention, "_scores", noted)
    monkeypatch.setattr(block_attention, "_fused_on_cpu", lambda *_: False)
    monkeypatch.setattr(block_attention, "QUERY_BLOCK", 16)
    round_the_ring(case, 1)
    assert max(queries for queries, _ in seen) == 16 and max(keys for _, keys in seen) == 16 + 20 - 1
