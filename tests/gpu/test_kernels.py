"""Every kernel of the product on a GPU: one launch, and an error against fp64 that is not larger than op by op."""

import pytest
import torch
from support.models import kernel_cases
from torch import Tensor
from torch.nn.functional import grouped_mm

from isoloss.parallel.ops import flash_linear_attention, gated_delta, short_convolution
from isoloss.parallel.ops.matmul import add_product
from isoloss.parallel.ops.varlen import VarlenCache

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device")]


def launches(run) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_one_launch_that_loses_no_more_than_op_by_op(name):
    kernel, make = kernel_cases.CASES[name]
    inputs = [each.cuda() if isinstance(each, Tensor) else each for each in make()]
    right = kernel.op_by_op(*kernel_cases.exact(inputs))
    with torch.no_grad():
        found, by_ops = kernel(*inputs), kernel.op_by_op(*inputs)
        assert len(names := launches(lambda: kernel(*inputs))) == 1, names
    for one, other in zip(kernel_cases.errors(found, right), kernel_cases.errors(by_ops, right), strict=True):
        assert one <= 1.05 * other + 1e-7


@pytest.mark.parametrize("keep", (True, False))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
def test_a_product_adds_to_what_is_there(dtype, keep):
    """In fp32 where the factors have 16 bits, in place."""
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(*shape, generator=random).to(dtype).cuda() for shape in ((96, 512), (512, 80)))
    kind = torch.float32 if dtype == torch.bfloat16 else dtype
    total = torch.randn(96, 80, generator=random).to(kind).cuda()
    wanted = left.double() @ right.double() + (total.double() if keep else 0)
    add_product(total, left, right, keep=keep)
    error = float((total.double() - wanted).norm() / wanted.norm())
    assert error <= {torch.bfloat16: 1e-5, torch.float32: 1e-3, torch.float64: 1e-13}[dtype]  # fp32: TF32 at worst


def test_a_grouped_product_is_each_experts_product():
    random = torch.Generator().manual_seed(0)
    ends = torch.tensor([40, 40, 104], dtype=torch.int32).cuda()  # the second expert has no rows
    rows, matrices = (torch.randn(*shape, generator=random).bfloat16().cuda() for shape in ((104, 64), (3, 32, 64)))
    found = grouped_mm(rows, matrices.mT, offs=ends)
    wanted = torch.cat([rows[:40].double() @ matrices[0].double().T, rows[40:].double() @ matrices[2].double().T])
    assert float((found.double() - wanted).norm()) <= 1e-2 * float(wanted.norm())


@pytest.mark.skipif(GPUS == 0 or flash_linear_attention.why_not() is not None, reason="fla has no kernels here")
@pytest.mark.parametrize("lengths", [(300, 2, 65, 1, 200), (568,)], ids=str)
def test_a_gated_delta_rule_loses_no_more_than_products_by_chunks(lengths):
    """In bf16, with slow decays, over documents of less than a chunk: outputs and gradients of both."""
    random = torch.Generator().manual_seed(0)
    tokens, keys, heads, width = sum(lengths), 2, 4, 64
    query, key = (torch.randn(tokens, keys, width, generator=random).bfloat16() for _ in range(2))
    value, grad = (torch.randn(tokens, heads, width, generator=random).bfloat16() for _ in range(2))
    speeds = torch.tensor([0.005, 0.05, 1.0, 16.0])
    decay, rate = -speeds * torch.rand(tokens, heads, generator=random), torch.rand(tokens, heads, generator=random)
    x, weight = torch.randn(tokens, 256, generator=random).bfloat16(), torch.randn(256, 4, generator=random).bfloat16()

    def run(rule, convolution, dtype=None):
        leaves = [t.cuda().to(dtype or t.dtype).requires_grad_() for t in (query, key, value, decay, rate, x, weight)]
        out = rule.delta_rule(gated_delta.DeltaInputs(*leaves[:5]), lengths, VarlenCache())
        mixed = convolution.short_convolution(*leaves[5:], lengths, VarlenCache())
        mixed.square().sum().backward()
        (out * grad.cuda().to(out.dtype)).sum().backward()
        return [out.detach(), mixed.detach(), *(leaf.grad for leaf in leaves)]

    twins = gated_delta, short_convolution
    fast = run(flash_linear_attention, flash_linear_attention)
    for found, twin, right in zip(fast, run(*twins), run(*twins, torch.float64), strict=True):
        error, of_twin = ((each.double() - right).norm() / right.norm() for each in (found, twin))
        assert error <= 2 * of_twin + 5e-3  # the kernels round their factors to bf16
