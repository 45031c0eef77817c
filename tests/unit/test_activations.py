"""Gated activations against their formulas in plain torch, values and gradients, far beyond where they are clamped."""

import pytest
import torch
from support.models.compiled_kernels import as_on_a_gpu
from torch.nn.functional import gelu, silu

from isoloss.models.mcore.layers import activations
from isoloss.models.mcore.layers.activations import clamped_swiglu, geglu, swiglu
from isoloss.parallel.ops import row_blocks

KERNELS = {
    swiglu: (activations.swiglu_forward, activations.swiglu_backward),
    geglu: (activations.geglu_forward, activations.geglu_backward),
    clamped_swiglu: (activations.clamped_swiglu_forward, activations.clamped_swiglu_backward),
}


def wide() -> torch.Tensor:
    return (10 * torch.randn(64, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).requires_grad_()


def gelu_by_tanh(x: torch.Tensor) -> torch.Tensor:
    return gelu(x, approximate="tanh")


GATES = pytest.mark.parametrize(("activation", "of_gate"), [(swiglu, silu), (geglu, gelu_by_tanh)])


@GATES
def test_a_gate(activation, of_gate):
    x = wide()
    torch.testing.assert_close(activation(x), of_gate(x[:, :3]) * x[:, 3:])
    assert torch.autograd.gradcheck(activation, (x,))


@GATES
@pytest.mark.parametrize("rows", [0, 1, 9, 10])
def test_a_cpu_passes_over_a_few_rows_at_a_time(monkeypatch, rows, activation, of_gate):
    monkeypatch.setattr(row_blocks, "CACHED_ELEMENTS", 3 * 6)
    x = wide()[None, :rows].detach().requires_grad_()
    y = x.detach().clone().requires_grad_()
    found, wanted = activation(x), of_gate(y[..., :3]) * y[..., 3:]
    assert found.shape == wanted.shape and torch.equal(found, wanted)
    grad = torch.randn(3, rows, 1, dtype=torch.float64).transpose(0, 2)  # with gaps, as autograd may give it
    found.backward(grad)
    wanted.backward(grad)
    assert x.grad is not None and y.grad is not None
    torch.testing.assert_close(x.grad, y.grad)


def test_the_clamped_one_of_gpt_oss():
    """The gate is clamped from above only, the other half from both sides; transformers, modeling_gpt_oss.py."""
    x = wide()
    gate, up = torch.minimum(x[:, :3], torch.tensor(7.0)), x[:, 3:].clip(-7, 7)
    torch.testing.assert_close(clamped_swiglu(x), (up + 1) * (gate / (1 + torch.exp(-1.702 * gate))))
    assert (x[:, :3] < -7).any() and (x[:, :3] > 7).any()
    by_hand = clamped_swiglu(torch.tensor([[-10.0, 1.0]], dtype=torch.float64))
    torch.testing.assert_close(by_hand, torch.tensor([[-20.0 / (1 + 2.718281828459045**17.02)]], dtype=torch.float64))


@pytest.mark.parametrize("activation", KERNELS, ids=lambda activation: activation.__name__)
def test_the_kernels_of_a_gpu_compute_the_same(activation):
    x, again, grad = wide(), wide(), wide()[:, :3].detach()
    expected, found = activation(x), activations.InOneKernel.apply(again, *KERNELS[activation])
    lost = 1e-12 if activation is geglu else 1e-14  # torch adds 1 to a tanh close to -1
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=lost)
    for result in (expected, found):
        result.backward(grad)
    torch.testing.assert_close(again.grad, x.grad, rtol=1e-13, atol=lost)


@pytest.mark.parametrize("activation", KERNELS, ids=lambda activation: activation.__name__)
def test_a_compiler_makes_one_kernel_of_each_that_loses_no_more(activation):
    """Op by op every step rounds."""
    forward, backward = KERNELS[activation]
    x, grad = wide().detach().bfloat16(), wide().detach().flip(0)[:, :3].bfloat16()
    exact, exact_grad = forward.op_by_op(x.double()), backward.op_by_op(x.double(), grad.double())
    rounded = x.clone().requires_grad_()
    (by_ops := activation(rounded)).backward(grad)
    assert rounded.grad is not None
    for function, inputs, op_by_op, right in (
        (forward, (x,), by_ops, exact),
        (backward, (x, grad), rounded.grad, exact_grad),
    ):
        found, kernels = as_on_a_gpu(function, *inputs)
        assert kernels == 1
        assert found.dtype == torch.bfloat16 and found.is_contiguous()
        torch.testing.assert_close(found.double(), right, rtol=2**-8, atol=1e-30)  # half a unit in the last place
        lost, lost_op_by_op = (
            ((got.detach().double() - right) / right).abs().nan_to_num() for got in (found, op_by_op)
        )
        assert lost.max() <= lost_op_by_op.max() and lost.mean() < 0.9 * lost_op_by_op.mean()
