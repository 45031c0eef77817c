"""Log-probabilities and entropy on one rank against a dense fp64 log-softmax: values, gradients, chunks, padding.

Errors are norm-wise, in units of the rounding of the inputs' type times the largest logit.
"""

from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.ranks.vocab import dense_reference
from torch._inductor.utils import run_and_get_code

from isoloss.parallel import loss_head
from isoloss.parallel.loss_head import LossHeadOptions, LowRank, softcapped, unrounded_logits, vocab_parallel_logprobs
from isoloss.parallel.ops import loss_head_kernels as kernels
from isoloss.parallel.ops import matmul, row_blocks

ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


@st.composite
def problems(draw):
    """(N, D, V, padding, chunk_elements, scale, seed); chunks from one position to more than all."""
    n, d, v = draw(st.integers(0, 9)), draw(st.integers(1, 12)), draw(st.integers(1, 50))
    chunk = draw(st.sampled_from([1, v, 2 * v, 3 * v + 1, 100 * v]))
    padding, scale = draw(st.sampled_from([0, 1, 7, 128])), draw(st.sampled_from([0.1, 1.0, 10.0]))
    return n, d, v, padding, chunk, scale, draw(st.integers(0, 2**31))


def check(group, problem, dtype, with_entropy, fused, tolerance):
    n, d, v, padding, chunk, scale, seed = problem
    random = torch.Generator().manual_seed(seed)
    # Logits of about `scale`.
    hidden = (torch.randn(n, d, generator=random) * scale * d**-0.5).to(dtype).requires_grad_()
    weight = torch.randn(v + padding, d, generator=random).to(dtype)
    weight[v:] = 1e3  # had padding a say, it would win
    weight.requires_grad_()
    targets = torch.randint(v, (n,), generator=random)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    grads = torch.randn(2, n, generator=random).to(compute) * torch.tensor([[1.0], [float(with_entropy)]])

    logprobs, entropy = vocab_parallel_logprobs(
        hidden, weight, targets, v, group, LossHeadOptions(with_entropy=with_entropy, fused=fused, chunk_elements=chunk)
    )
    assert logprobs.dtype == compute and logprobs.shape == (n,)
    assert (entropy is not None) == with_entropy
    total = (grads[0] * logprobs).sum()
    if entropy is not None:
        assert entropy.dtype == compute and entropy.shape == (n,)
        total = total + (grads[1] * entropy).sum()
    total.backward()
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    assert not weight.grad[v:].any()

    wanted = dense_reference(hidden, weight[:v], targets, grads)
    pairs = [("logprobs", logprobs, wanted[0]), ("entropy", entropy, wanted[1]), ("hidden", hidden.grad, wanted[2])]
    # An error of rounding * logit in every logit is what the type allows; the rest follows from it.
    reach = 1 + float((hidden.detach().double() @ weight[:v].detach().double().T).abs().max()) if n else 1.0
    size = {
        "logprobs": n**0.5,
        "entropy": float((1 + wanted[1]).norm()),
        "hidden": float(grads.norm() * (1 + wanted[1]).max() * weight[:v].detach().double().norm()) if n else 1.0,
        "weight": float(grads.norm() * (1 + wanted[1]).max() * hidden.detach().double().norm()) if n else 1.0,
    }
    for name, got, reference in [*pairs, ("weight", weight.grad[:v], wanted[3])]:
        if got is not None:
            error = float((got.detach().double() - reference).norm())
            assert error <= tolerance * ROUNDING[dtype] * reach * size[name], (name, error)


FUSED = pytest.mark.parametrize("fused", [False, True], ids=["in place", "as kernels"])


@FUSED
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 4), (torch.float32, 4), (torch.bfloat16, 1)])
def test_values_and_gradients_are_those_of_a_dense_log_softmax(dtype, tolerance, with_entropy, fused, one_rank):
    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(problems())
    def check_all(problem):
        check(one_rank, problem, dtype, with_entropy, fused, tolerance)

    check_all()


@FUSED
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("std", [3.0, 6.0])
def test_bf16_weights_have_the_logits_that_their_numbers_give(std, temperature, fused, one_rank):
    """Nothing is rounded to bf16 on the way, neither logits nor what a temperature divides: that would move log p by
    0.01 to 0.02 on average."""
    random = torch.Generator().manual_seed(0)
    hidden = (torch.randn(256, 512, generator=random) * std * 512**-0.5).bfloat16()
    weight = torch.randn(4000, 512, generator=random).bfloat16()
    logits = hidden.double() @ weight.double().T
    with mock.patch.object(matmul, "onednn_is_faster", lambda: False):
        assert torch.equal(unrounded_logits(hidden, weight), hidden.float() @ weight.float().T)
    sizes = hidden.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    assert ((unrounded_logits(hidden, weight) - logits) / sizes).abs().max() <= 2 * torch.finfo(torch.float32).eps
    likely = torch.softmax(logits / temperature, -1)  # targets as a policy draws them
    targets = torch.multinomial(likely, 1, generator=random).squeeze(1)
    nothing = (torch.zeros(256), torch.zeros(256))
    wanted = dense_reference(hidden, weight, targets, nothing, temperature)
    options = {"temperature": temperature, "with_entropy": True, "fused": fused, "chunk_elements": 4000 * 100}
    found = vocab_parallel_logprobs(hidden, weight, targets, 4000, one_rank, LossHeadOptions(**options))
    for got, reference in zip(found, wanted):
        error = (got.double() - reference).abs()
        assert float(error.mean()) <= 5e-6 and float(error.max()) <= 5e-5


def test_a_large_bf16_matrix_is_converted_in_parts(one_rank, monkeypatch):
    monkeypatch.setattr(loss_head, "CONVERTED_ELEMENTS", 7 * 16)
    hidden, weight = torch.randn(5, 16).bfloat16(), torch.randn(31, 16).bfloat16()
    torch.testing.assert_close(unrounded_logits(hidden, weight), hidden.float() @ weight.float().T)


def check_head(hidden, weight, targets, grads, wanted, group, options):
    """Compare values and gradients of the head with those of `dense_reference`."""
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(h, w, targets, len(weight), group, options)
    assert logprobs.shape == targets.shape
    ((grads[0] * logprobs).sum() + (0 if entropy is None else (grads[1] * entropy).sum())).backward()
    for got, reference in zip((logprobs, entropy, h.grad, w.grad), wanted):
        if got is not None:
            torch.testing.assert_close(got.detach(), reference, rtol=1e-12, atol=1e-12)


@FUSED
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_chunks_change_rounding_only(one_rank, with_entropy, temperature, softcap, fused):
    """13 positions in chunks of 1, 2, 5, 13 and 1000: a short last chunk, and logits kept for the backward."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(13, 8, dtype=torch.float64), torch.randn(31, 8, dtype=torch.float64)
    targets, grads = torch.randint(31, (13,)), torch.randn(2, 13, dtype=torch.float64)
    wanted = dense_reference(hidden, weight, targets, (grads[0], grads[1] * with_entropy), temperature, softcap)
    for chunk in (1, 2, 5, 13, 1000):
        options = LossHeadOptions(temperature, softcap, with_entropy, fused, 31 * chunk)
        check_head(hidden, weight, targets, grads, wanted, one_rank, options)


@FUSED
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_several_targets_of_a_position(one_rank, with_entropy, softcap, fused):
    """One, two and 40 of 31 tokens, so that some repeat, each with a gradient of its own, in chunks or kept."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(13, 8, dtype=torch.float64), torch.randn(31, 8, dtype=torch.float64)
    for several in (1, 2, 40):
        targets, grads = torch.randint(31, (13, several)), torch.randn(13, several + 1, dtype=torch.float64)
        grads = grads[:, 1:], grads[:, 0] * with_entropy
        wanted = dense_reference(hidden, weight, targets, grads, 0.7, softcap)
        for chunk in (5, 1000):
            options = LossHeadOptions(0.7, softcap, with_entropy, fused, 31 * chunk)
            check_head(hidden, weight, targets, grads, wanted, one_rank, options)


@FUSED
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_product_of_low_rank_is_added_to_the_logits(one_rank, with_entropy, softcap, fused):
    """As if its factors were further columns of the hidden states and of the output matrix."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(13, 8 + 3, dtype=torch.float64), torch.randn(31 + 2, 8 + 3, dtype=torch.float64)
    targets, grads = torch.randint(31, (13,)), torch.randn(2, 13, dtype=torch.float64)
    wanted = dense_reference(hidden, weight[:31], targets, (grads[0], grads[1] * with_entropy), 0.7, softcap)
    for chunk in (5, 1000):
        (h, down), (w, up) = ([part.clone().requires_grad_() for part in t.split((8, 3), 1)] for t in (hidden, weight))
        options = LossHeadOptions(0.7, softcap, with_entropy, fused, 31 * chunk)
        logprobs, entropy = vocab_parallel_logprobs(h, w, targets, 31, one_rank, options, low_rank=LowRank(down, up))
        ((grads[0] * logprobs).sum() + (0 if entropy is None else (grads[1] * entropy).sum())).backward()
        assert h.grad is not None and down.grad is not None and w.grad is not None and up.grad is not None
        found = logprobs, entropy, torch.cat([h.grad, down.grad], 1), torch.cat([w.grad, up.grad], 1)[:31]
        for got, reference in zip(found, wanted):
            if got is not None:
                torch.testing.assert_close(got.detach(), reference, rtol=1e-12, atol=1e-12)
        assert not up.grad[31:].any()


@FUSED
def test_a_gradient_of_several_targets_is_rounded_once(one_rank, fused):
    """With the identity as output matrix, that of the hidden state is that of the logits."""
    torch.manual_seed(0)
    targets, grads = torch.tensor([[0, 0, 1]]), torch.rand(1, 3)
    hidden, weight = torch.randn(1, 3).bfloat16().requires_grad_(), torch.eye(3).bfloat16().requires_grad_()
    options = LossHeadOptions(fused=fused)
    vocab_parallel_logprobs(hidden, weight, targets, 3, one_rank, options)[0].backward(grads)
    wanted = dense_reference(hidden, weight, targets, (grads, torch.zeros(1)))[2]
    assert hidden.grad is not None and torch.equal(hidden.grad, wanted.bfloat16())


def test_bf16_weight_gradients_are_accumulated_in_fp32(one_rank):
    """512 equal terms, a chunk each: a bf16 sum would stop growing at 256 terms."""
    hidden, weight = torch.ones(512, 4).bfloat16(), torch.zeros(2, 4).bfloat16().requires_grad_()
    logprobs, _ = vocab_parallel_logprobs(
        hidden, weight, torch.zeros(512, dtype=torch.int64), 2, one_rank, LossHeadOptions(chunk_elements=2)
    )
    logprobs.sum().backward()
    assert torch.equal(weight.grad, torch.tensor([[256.0] * 4, [-256.0] * 4]).bfloat16())


@FUSED
def test_entropy_of_a_flat_and_of_a_peaked_distribution(one_rank, fused):
    """5000 columns in fp32: neither may lose more than a few roundings of its log-sum-exp."""
    random = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(64, 64, generator=random), torch.randn(5000, 64, generator=random)
    targets = torch.zeros(64, dtype=torch.int64)
    for scale in (0.0, 0.1, 1.0, 3.0):
        nothing = (torch.zeros(64), torch.zeros(64))
        _, wanted, _, _ = dense_reference(hidden * scale, weight, targets, nothing)
        _, entropy = vocab_parallel_logprobs(
            hidden * scale, weight, targets, 5000, one_rank, LossHeadOptions(with_entropy=True, fused=fused)
        )
        largest = float((hidden * scale @ weight.T).logsumexp(1).max())
        assert float((entropy - wanted).abs().max()) <= 4 * 2.0**-24 * largest, scale


def test_a_second_backward_is_right_or_refused(one_rank):
    """The backward works in place on the logits that a single chunk kept: autograd must notice."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 8).requires_grad_(), torch.randn(11, 8).requires_grad_()
    for chunk, kept in ((11, False), (1000, True)):
        logprobs, _ = vocab_parallel_logprobs(
            hidden, weight, torch.arange(4), 11, one_rank, LossHeadOptions(with_entropy=True, chunk_elements=chunk)
        )
        first = torch.autograd.grad(logprobs.sum(), (hidden, weight), retain_graph=True)
        if kept:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(logprobs.sum(), (hidden, weight))
        else:
            second = torch.autograd.grad(logprobs.sum(), (hidden, weight))
            assert all(torch.equal(a, b) for a, b in zip(first, second))


@FUSED
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_without_positions_the_result_is_an_empty_one_that_is_connected(dtype, with_entropy, fused, one_rank):
    hidden, weight = torch.zeros(0, 8, dtype=dtype, requires_grad=True), torch.ones(16, 8, dtype=dtype)
    weight.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(
        hidden,
        weight,
        torch.zeros(0, dtype=torch.int64),
        13,
        one_rank,
        LossHeadOptions(with_entropy=with_entropy, fused=fused),
    )
    assert logprobs.shape == (0,) and logprobs.requires_grad
    several, _ = vocab_parallel_logprobs(hidden, weight, torch.zeros(0, 4, dtype=torch.int64), 13, one_rank)
    assert several.shape == (0, 4) and several.requires_grad
    (logprobs.sum() + (0 if entropy is None else entropy.sum())).backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, 8)
    assert weight.grad is not None and torch.equal(weight.grad, torch.zeros(16, 8, dtype=dtype))


@FUSED
def test_large_logits_neither_overflow_nor_lose_the_entropy(one_rank, fused):
    """Logits of +-2000: a naive exp would be infinite, and 0 * inf NaN."""
    hidden = torch.tensor([[2000.0], [-2000.0], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(
        hidden, weight, torch.tensor([0, 0, 1]), 3, one_rank, LossHeadOptions(with_entropy=True, fused=fused)
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.tolist() == pytest.approx([0.0, -4000.0, -1.0986123], rel=1e-6)
    assert entropy.tolist() == pytest.approx([0.0, 0.0, 1.0986123], rel=1e-6)
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


@FUSED
@pytest.mark.parametrize("chunk", [7, 1000])
def test_a_gradient_added_to_a_buffer_is_that_of_autograd(one_rank, fused, chunk):
    """The padding of the buffer stays; what autograd gets has no meaning, which Megatron's hook is told."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(13, 8).bfloat16(), torch.randn(31, 8).bfloat16()
    targets, before = torch.randint(29, (13,)), torch.randn(31, 8)
    options = {"fused": fused, "chunk_elements": 29 * chunk}
    found = []
    for main_grad in (None, before.clone()):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, _ = vocab_parallel_logprobs(h, w, targets, 29, one_rank, LossHeadOptions(**options), main_grad)
        logprobs.sum().backward()
        assert getattr(w, "grad_added_to_main_grad", False) == (main_grad is not None)
        found.append((h.grad, before + w.grad if main_grad is None else main_grad))
    exact = dense_reference(hidden, weight[:29], targets, (torch.ones(13), torch.zeros(13)))[3]
    (h_autograd, sum_autograd), (h_buffer, sum_buffer) = found
    assert torch.equal(h_autograd, h_buffer) and torch.equal(sum_buffer[29:], before[29:])
    errors = [float((each[:29].double() - before[:29].double() - exact).norm()) for each in (sum_autograd, sum_buffer)]
    assert errors[1] <= errors[0] <= 0.02 * float(exact.norm())


def test_capped_logits_in_place(monkeypatch):
    monkeypatch.setattr(row_blocks, "CACHED_ELEMENTS", 2 * 7)
    logits = 5 * torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    wanted = 3 * torch.tanh(logits / 3)
    assert softcapped(logits, None) is logits and softcapped(logits, 3.0) is logits
    torch.testing.assert_close(logits, wanted)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_chunk_of_logits_is_passed_over_by_one_kernel_each_way(with_entropy, softcap):
    """The compiler puts all of each function into one, and its numbers are those op by op. In a large chunk, whose rows
    a GPU goes over with one block of threads each."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 2003, generator=random) * 3
    targets = torch.randint(-1, 2003, (300,), generator=random)
    lse, grad, entropy, grad_entropy = torch.randn(4, 300, generator=random) + torch.tensor([[9.0], [0], [0], [0]])
    calls = [(kernels.statistics, (logits, targets, 0.7, softcap, with_entropy))]
    if with_entropy:
        arguments = (logits, targets, lse, grad, entropy, grad_entropy, 0.7, softcap, torch.bfloat16)
        calls.append((kernels.gradient_with_entropy, arguments))
    else:
        calls.append((kernels.gradient, (logits, targets, lse, grad, 0.7, softcap, torch.bfloat16)))
    for kernel, arguments in calls:
        found, (code,) = run_and_get_code(kernel.compiled, *arguments)
        assert code.count("async_compile.cpp") == 1, kernel.__name__
        torch.testing.assert_close(found, kernel.op_by_op(*arguments))
