"""The norm over all heads together, whatever the number of TP ranks: output and gradients are those of its formula."""

import pytest
import torch
from numerics.joint_norm import EPS, sharded
from support.models import kernel_cases
from torch._inductor.utils import run_and_get_code


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_it_is_the_norm_of_all_heads(pool, tp, dtype, tolerance):
    random = torch.Generator().manual_seed(5)
    shapes = ((7, 4, 6), (4, 6), (7, 4, 6))
    x, weight, grad = (torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes)
    x_exact, weight_exact = (t.double().clone().requires_grad_() for t in (x, weight))
    out = x_exact * (x_exact.square().mean((1, 2), keepdim=True) + EPS).rsqrt() * weight_exact
    out.backward(grad.double())
    ranks = pool.run(tp, sharded, x, weight, grad, tp)
    for k, wanted in enumerate((out.detach(), x_exact.grad, weight_exact.grad)):
        found = torch.cat([rank[k] for rank in ranks], -2)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["sum_of_squares", "scaled", "sum_along_the_norm", "joint_norm_backward"])
def test_a_compiler_makes_one_kernel(name):
    kernel, make = kernel_cases.CASES[name]
    inputs = make()
    right = kernel.op_by_op(*kernel_cases.exact(inputs))
    found, (code,) = run_and_get_code(kernel.compiled, *inputs)
    assert code.count("async_compile.cpp") == 1
    assert ((found.double() - right).norm() / right.norm()).item() < 2**-8
