"""All experts at once, beside one after the other."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from support.models.compiled_kernels import as_on_a_gpu
from support.ranks import grouped
from torch.nn.functional import gelu, silu

from isoloss.models.mcore.moe import dispatch, grouped_experts
from isoloss.models.mcore.moe.dispatch import add_rows, rows_by_expert
from isoloss.models.mcore.moe.grouped_experts import (
    WEIGHTED,
    _Experts,
    weighted_geglu,
    weighted_geglu_again,
    weighted_geglu_backward,
    weighted_swiglu,
    weighted_swiglu_again,
    weighted_swiglu_backward,
    without_empty,
)

# Rows of each expert: uneven, some without any, one with all, none at all.
COUNTS = ((5, 3, 8), (0, 7, 0), (16, 0, 0), (0, 0, 0), (1,))
HIDDEN, INNER = 24, 16
PLAIN = (None, None)  # without adapters


def problem(counts, dtype):
    rng = torch.Generator().manual_seed(3)
    draw = partial(torch.randn, generator=rng, dtype=torch.float64)
    rows, experts = sum(counts), len(counts)
    weights = torch.rand(rows, generator=rng, dtype=torch.float64)
    inner = [draw(2 * INNER, HIDDEN) / 5 for _ in range(experts)]
    outer = [draw(HIDDEN, INNER) / 5 for _ in range(experts)]
    tensors = [draw(rows, HIDDEN), weights, *inner, *outer]
    ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32)
    # What is compared starts from the same numbers in every precision.
    rounded = [tensor.bfloat16().double() for tensor in tensors]
    of_router = torch.promote_types(dtype, torch.float32)
    given = [tensor.to(of_router if tensor is rounded[1] else dtype).requires_grad_() for tensor in rounded]
    return ends, given, draw(rows, HIDDEN).bfloat16().to(dtype)


GATES = {"swiglu": silu, "geglu": partial(gelu, approximate="tanh")}


def one_by_one(counts, rows, weights, *matrices, activation="swiglu"):
    """The sum of what Megatron's MLP does for each expert, which rounds where a product ends."""
    outputs = []
    for index, (x, w) in enumerate(zip(rows.split(counts), weights.split(counts))):
        gate, up = (x @ matrices[index].mT).chunk(2, -1)
        active = ((GATES[activation](gate) * up) * w[:, None]).to(rows.dtype)
        outputs.append(active @ matrices[len(counts) + index].mT)
    return torch.cat(outputs)


def results(function, tensors, grad):
    output = function(*tensors)
    gradients = torch.autograd.grad(output, tensors, grad, allow_unused=True)
    return [output, *(torch.zeros_like(t) if g is None else g for g, t in zip(gradients, tensors))]


@pytest.mark.parametrize("again", (False, True), ids=("kept", "again"))
@pytest.mark.parametrize("known", (False, True), ids=("on the device", "on the host"))
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_the_same_as_one_by_one(monkeypatch, counts, known, again):
    """known: who has no rows."""
    monkeypatch.setattr(grouped_experts, "grouped_mm", grouped.product)
    compare_with_one_by_one(counts, known, again, "swiglu")


RANK, SCALE = 3, 0.7


def merged(counts, rows, weights, *tensors):
    """As `one_by_one`, of W + scale * B A: of gate and up each has an A of its own."""
    experts, rest = len(counts), tensors[2 * len(counts) :]
    a_in, b_in, a_out, b_out = (rest[k * experts : (k + 1) * experts] for k in range(4))
    inner, outer = tensors[:experts], tensors[experts : 2 * experts]
    of_gate_and_up = [
        w + SCALE * torch.cat([b[:INNER] @ a[:RANK], b[INNER:] @ a[RANK:]]) for w, a, b in zip(inner, a_in, b_in)
    ]
    return one_by_one(
        counts, rows, weights, *of_gate_and_up, *(w + SCALE * b @ a for w, a, b in zip(outer, a_out, b_out))
    )


@pytest.mark.parametrize("again", (False, True), ids=("kept", "again"))
@pytest.mark.parametrize("known", (False, True), ids=("on the device", "on the host"))
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_adapters_are_those_of_merged_weights(monkeypatch, counts, known, again):
    monkeypatch.setattr(grouped_experts, "grouped_mm", grouped.product)
    ends, tensors, grad = problem(counts, torch.float64)
    experts, rng = len(counts), torch.Generator().manual_seed(5)
    shapes = ((2 * RANK, HIDDEN), (2 * INNER, RANK), (RANK, INNER), (HIDDEN, RANK))
    factors = [
        torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_()
        for shape in shapes
        for _ in range(experts)
    ]
    halves = [slice(0, INNER), slice(INNER, 2 * INNER)], [slice(0, RANK), slice(RANK, 2 * RANK)]
    whole = [(slice(0, HIDDEN), slice(0, RANK))]
    linears = grouped_experts.Between([*zip(*halves)], SCALE), grouped_experts.Between(whole, SCALE)
    empty = [expert for expert, rows in enumerate(counts) if not rows] if known else None

    def at_once(rows, weights, *tensors):
        inner, outer = tensors[:experts], tensors[experts : 2 * experts]
        for frozen in (*inner, *outer):
            frozen.requires_grad_(False)
        rest = tensors[2 * experts :]
        mine = (*inner, *rest[: 2 * experts], *outer, *rest[2 * experts :])
        return _Experts.apply(rows, weights, ends, again, empty, WEIGHTED["swiglu"], linears, *mine)

    wanted = results(partial(merged, counts), [*tensors, *factors], grad)
    found = at_once(*tensors, *factors)
    gradients = torch.autograd.grad(found, [*tensors[:2], *factors], grad)
    for one, other in zip([found, *gradients], [*wanted[:3], *wanted[3 + 2 * experts :]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("again", (False, True), ids=("kept", "again"))
def test_geglu_is_the_same_as_one_by_one(monkeypatch, again):
    monkeypatch.setattr(grouped_experts, "grouped_mm", grouped.product)
    compare_with_one_by_one((5, 0, 8), True, again, "geglu")


def compare_with_one_by_one(counts, known, again, activation):
    ends, tensors, grad = problem(counts, torch.float64)
    how = (
        ends,
        again,
        [expert for expert, rows in enumerate(counts) if not rows] if known else None,
        WEIGHTED[activation],
        PLAIN,
    )
    found = results(lambda rows, weights, *more: _Experts.apply(rows, weights, *how, *more), tensors, grad)
    for one, other in zip(
        found, results(partial(one_by_one, counts, activation=activation), tensors, grad), strict=True
    ):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("counts", ((40, 24, 64), (0, 56, 0), (128, 0, 0), (0, 0, 0), (64,)), ids=str)
def test_torchs_own_product_is_as_good_in_bf16(counts):
    """Against fp64 the error is not larger than that of one expert after the other."""
    ends, exact, grad = problem(counts, torch.float64)
    wanted = results(partial(one_by_one, counts), exact, grad)
    _, rounded, grad = problem(counts, torch.bfloat16)
    found = results(
        lambda rows, weights, *more: _Experts.apply(rows, weights, ends, False, None, WEIGHTED["swiglu"], PLAIN, *more),
        rounded,
        grad,
    )
    twin = results(partial(one_by_one, counts), rounded, grad)

    def error(tensors):
        pairs = ((one.detach().double(), other.detach()) for one, other in zip(tensors, wanted))
        return sum(float((one - other).norm() / (1e-9 + other.norm())) for one, other in pairs)

    assert error(found) <= error(twin)
    assert sum(counts) == 0 or error(twin) > 0


def test_gradients_are_added_where_megatron_keeps_them(monkeypatch):
    """What autograd gets then only wakes its hooks."""
    monkeypatch.setattr(grouped_experts, "grouped_mm", grouped.product)
    counts = (5, 0, 8)
    ends, tensors, grad = problem(counts, torch.float64)
    wanted = results(partial(one_by_one, counts), tensors, grad)[3:]
    woken = []
    for matrix in tensors[2:]:
        matrix.main_grad, matrix.grad_added_to_main_grad = torch.ones_like(matrix), False
        matrix.register_post_accumulate_grad_hook(woken.append)
    for _ in range(2):
        _Experts.apply(*tensors[:2], ends, False, None, WEIGHTED["swiglu"], PLAIN, *tensors[2:]).backward(grad)
    for matrix, gradient in zip(tensors[2:], wanted, strict=True):
        assert matrix.grad_added_to_main_grad
        torch.testing.assert_close(matrix.main_grad, 1 + 2 * gradient, rtol=1e-12, atol=1e-12)
    assert len(woken) == 2 * len(tensors[2:])


def test_what_is_computed_again_is_not_kept(monkeypatch):
    """Gate and up of 16 rows."""
    monkeypatch.setattr(grouped_experts, "grouped_mm", grouped.product)
    ends, tensors, _ = problem((5, 3, 8), torch.float64)

    def kept(again):
        nbytes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: nbytes.append(t.nbytes), lambda t: t):
            _Experts.apply(*tensors[:2], ends, again, None, WEIGHTED["swiglu"], PLAIN, *tensors[2:])
        return sum(nbytes)

    assert kept(False) - kept(True) == 16 * 2 * INNER * 8


def gradient_problem():
    return torch.randn(50, 2 * INNER).bfloat16(), torch.rand(50), torch.randn(50, INNER).bfloat16()


KERNELS = {
    "forward": (weighted_swiglu, lambda: (torch.randn(50, 2 * INNER).bfloat16(), torch.rand(50))),
    "again": (weighted_swiglu_again, gradient_problem),
    "backward": (weighted_swiglu_backward, gradient_problem),
    "geglu-forward": (weighted_geglu, lambda: (torch.randn(50, 2 * INNER).bfloat16(), torch.rand(50))),
    "geglu-again": (weighted_geglu_again, gradient_problem),
    "geglu-backward": (weighted_geglu_backward, gradient_problem),
    "sum": (add_rows, lambda: (torch.randn(50, HIDDEN).bfloat16(), torch.randint(0, 50, (20, 4)))),
    "mask": (without_empty, lambda: (torch.randn(3, 8, 8).bfloat16(), torch.tensor([4, 4, 9], dtype=torch.int32))),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_compiler_makes_one_kernel(name):
    function, make = KERNELS[name]
    inputs = make()
    found, count = as_on_a_gpu(function, *inputs)
    assert count == 1
    torch.testing.assert_close(found, function.op_by_op(*inputs), rtol=1e-2, atol=1e-2)


def test_rows_are_those_of_megatrons_permutation():
    """By expert, then by token; and each token finds its own."""
    rng = np.random.default_rng(5)
    tokens, experts, chosen = 19, 6, 3
    chosen_ZX = torch.from_numpy(np.stack([rng.permutation(experts - 1)[:chosen] for _ in range(tokens)]))
    rows = rows_by_expert(chosen_ZX, experts)
    wanted = [(e, z) for e in range(experts) for z in range(tokens) if e in chosen_ZX[z]]
    experts_R = chosen_ZX.flatten()[rows.pair_R]
    assert list(zip(experts_R.tolist(), rows.token_R.tolist())) == wanted
    assert rows.ends_E.dtype == torch.int32
    assert rows.ends_E.tolist() == np.cumsum([sum(e == g for g, _ in wanted) for e in range(experts)]).tolist()
    assert (rows.token_R[rows.row_ZX] == torch.arange(tokens)[:, None]).all()


def test_chunks_change_their_order_and_back():
    sizes = np.array([[2, 0, 3], [1, 4, 0]])
    rows = torch.arange(10)
    there = dispatch._regrouped(rows, sizes)
    assert there.tolist() == [0, 1, 5, 6, 7, 8, 9, 2, 3, 4]
    assert dispatch._regrouped(there, sizes.T).tolist() == rows.tolist()


def test_an_expert_is_empty_where_no_rank_sends_to_it():
    chunks = np.array([[2, 0, 3, 0], [1, 4, 0, 0]])
    assert dispatch.Sizes([], [], [], chunks, torch.empty(0)).empty == [3]
