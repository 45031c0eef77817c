"""The sum of the residual stream and attention's output, and its norm, in one kernel: against its formula in numpy, and
against torch's sum and norm."""

import numpy as np
import pytest
import torch
from torch._decomp import get_decompositions
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import rms_norm

from isoloss.models.mcore.layer_config import LayerConfig
from isoloss.models.mcore.layers import residual_norm
from isoloss.models.mcore.layers.norm import of_torch, weight_gradient
from isoloss.models.mcore.layers.residual_norm import ResidualNorm, _AddAndNorm, add_and_norm, add_and_norm_backward

ROWS, WIDTH, EPS = 40, 24, 1e-2  # large enough to be seen


def problem(rows=ROWS, width=WIDTH) -> list[torch.Tensor]:
    """Output and residual, weight, gradients of sum and norm: numbers that bf16 has."""
    rng = torch.Generator().manual_seed(0)
    shapes = ((rows, 1, width), (rows, 1, width), (width,), (rows, 1, width), (rows, 1, width))
    return [torch.randn(shape, generator=rng, dtype=torch.float64).bfloat16().double() for shape in shapes]


def by_formula(output, residual, weight, grad_total, grad_normed) -> list[np.ndarray]:
    """Sum, norm, and gradients of the summands and the weight, by the Jacobian of each row."""
    total, weight = (output + residual).numpy()[:, 0], weight.numpy()
    root = np.sqrt((total**2).mean(1) + EPS)
    normed, along, through = total / root[:, None] * weight, grad_total.numpy()[:, 0], grad_normed.numpy()[:, 0]
    jacobians = np.eye(WIDTH) / root[:, None, None] - total[:, :, None] * total[:, None] / (
        WIDTH * root[:, None, None] ** 3
    )
    grad = along + np.einsum("ri,rij->rj", through * weight, jacobians)
    return [total, normed, grad, (through * total / root[:, None]).sum(0)]


def results(function, tensors) -> list[torch.Tensor]:
    """Those of `by_formula`; both summands get the same gradient."""
    *given, grad_total, grad_normed = tensors
    given = [tensor.clone().requires_grad_() for tensor in given]
    outputs = function(*given)
    torch.autograd.backward(outputs, (grad_total, grad_normed))
    output, residual, weight = (tensor.grad for tensor in given)
    assert output is not None and residual is not None and weight is not None and output.equal(residual)
    return [*(tensor.detach() for tensor in outputs), output, weight]


def in_one(output, residual, weight):
    return _AddAndNorm.apply(output, residual, weight, EPS, 0.0)


def in_one_of_a_smaller_weight(output, residual, weight):
    return _AddAndNorm.apply(output, residual, weight - 1.0, EPS, 1.0)


def one_by_one(output, residual, weight):
    total = residual + output
    return total, rms_norm(total, weight.shape, weight, EPS)


@pytest.mark.parametrize(
    "function", (in_one, in_one_of_a_smaller_weight, one_by_one), ids=lambda function: function.__name__
)
def test_it_computes_the_formula(function):
    for found, expected in zip(results(function, problem()), by_formula(*problem()), strict=True):
        np.testing.assert_allclose(found.squeeze().numpy(), expected, rtol=1e-12, atol=1e-12)


def test_its_gradients_are_those_of_differences():
    assert torch.autograd.gradcheck(in_one, [tensor[:5].requires_grad_() for tensor in problem(5, 5)[:3]])


def test_a_compiler_makes_one_kernel_each_way_that_loses_no_more():
    """Op by op the sum is rounded before it is normed, and the gradient of the norm before it is added."""
    rows, width = 512, 1024
    exact = problem(rows, width)
    output, residual, weight, grad_total, grad_normed = rounded = [tensor.bfloat16() for tensor in exact]
    right, twin = results(in_one, exact), results(one_by_one, rounded)
    (total, normed, scale), (forth,) = run_and_get_code(add_and_norm.compiled, output, residual, weight, EPS, 0.0)
    backward = (grad_normed, grad_total, total, weight, scale, 0.0)
    grad, (back,) = run_and_get_code(add_and_norm_backward.compiled, *backward)
    assert forth.count("async_compile.cpp") == back.count("async_compile.cpp") == 1
    assert scale.shape == (rows, 1, 1) and scale.dtype == torch.float32
    found = [total, normed, grad, weight_gradient(grad_normed, total, weight, scale)]
    for got, exactly in zip(found, right, strict=True):
        assert got.dtype == torch.bfloat16 and got.shape == exactly.shape and got.is_contiguous()
    lost, by_twin = (
        [((got.double() - exactly).norm() / exactly.norm()).item() for got, exactly in zip(outputs, right, strict=True)]
        for outputs in (found, twin)
    )
    assert lost[0] == by_twin[0] < 0.003
    assert lost[1] < 0.8 * by_twin[1] and lost[2] < 0.9 * by_twin[2]
    assert lost[3] < 1.02 * by_twin[3]  # both are of the rounded sum: chance decides between them


def test_torchs_kernel_is_asked_for_the_gradient_of_the_weight():
    """A CPU has none; what torch says that it computes is run in its place."""
    op = torch.ops.aten._fused_rms_norm_backward
    output, residual, weight, _, grad_normed = problem()
    total, _, scale = add_and_norm.op_by_op(output, residual, weight, EPS, 0.0)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_fused_rms_norm_backward", get_decompositions([op])[op.default], "CPU")
        found = of_torch(grad_normed, total, weight, scale)
    torch.testing.assert_close(found, weight_gradient(grad_normed, total, weight, scale), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("with_bias", (False, True), ids=("plain", "bias"))
def test_what_is_added_is_normed_once(monkeypatch, with_bias):
    monkeypatch.setattr(residual_norm, "on_gpu", lambda hidden: True)
    output, residual, weight, *_ = problem()
    norm = ResidualNorm(LayerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1), WIDTH, EPS)
    norm.weight.data = weight
    add = norm.add(True, False)
    bias = weight.flip(0) if with_bias else None
    total, normed = one_by_one(output if bias is None else output + bias, residual, weight)
    for _ in range(2):
        found = add((output, bias), residual, 0.0)
        torch.testing.assert_close(found, total, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(norm(found), normed, rtol=1e-13, atol=1e-13)
    alone = output.flip(0)  # no sum that `add` made
    torch.testing.assert_close(norm(alone), rms_norm(alone, weight.shape, weight, EPS))
    add((output, bias), residual, 0.0)
    with pytest.raises(AssertionError):
        norm(found)
