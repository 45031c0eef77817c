"""Norms that torch does not have, and the gate of attention's output: against torch, and compiled."""

from functools import partial

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import rms_norm, silu

from isoloss.models.mcore.layer_config import LayerConfig
from isoloss.models.mcore.layers.grouped_attention import _Gated, gate_backward, gate_forward, gated
from isoloss.models.mcore.layers.norm import (
    RMSNorm,
    _OffsetNorm,
    gated_norm,
    gated_norm_backward,
    gated_norm_forward,
    norm_backward,
    offset_norm,
    unit_norm,
    weight_gradient,
)
from isoloss.parallel.ops import row_blocks
from isoloss.parallel.ops.fused import Fused

EPS = 1e-3


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outputs_and_gradients(function, *given: torch.Tensor) -> list[torch.Tensor]:
    given = tuple(tensor.clone().requires_grad_() for tensor in given)
    output = function(*given)
    gradients = torch.autograd.grad(output, given, draw(*output.shape, seed=9).to(output.dtype))
    return [output.detach(), *gradients]


def lost(found: list[torch.Tensor], right: list[torch.Tensor]) -> list[float]:
    return [((one.double() - other).norm() / other.norm()).item() for one, other in zip(found, right, strict=True)]


def test_the_norm_and_its_gradients_are_those_of_torch():
    found = outputs_and_gradients(lambda x, w: _OffsetNorm.apply(x, w, EPS, 1.0), draw(7, 1, 12), draw(12, seed=1))
    right = outputs_and_gradients(lambda x, w: rms_norm(x, (12,), 1 + w, EPS), draw(7, 1, 12), draw(12, seed=1))
    assert max(lost(found, right)) < 1e-14


def test_a_small_weight_is_not_lost_in_bf16():
    """1 + 0.003 is 1 in bf16."""
    config = LayerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=1, params_dtype=torch.bfloat16,
        layernorm_zero_centered_gamma=True,
    )  # fmt: skip
    norm = RMSNorm(config, 64, EPS)
    torch.nn.init.constant_(norm.weight, 0.003)
    x = draw(512, 64).bfloat16()
    exact = rms_norm(x.double(), (64,), 1 + norm.weight.double(), EPS)
    ratio = (norm(x).double() * exact).sum() / exact.square().sum()
    assert abs(ratio.item() - 1) < 3e-4


def test_the_norm_without_a_weight_and_its_gradient_are_those_of_torch():
    given = draw(7, 3, 12)
    right = outputs_and_gradients(lambda x: rms_norm(x, (12,), eps=EPS), given)
    assert max(lost(outputs_and_gradients(lambda x: unit_norm(x, EPS), given), right)) < 1e-14


def test_the_gate_and_its_gradients_are_those_of_torch():
    given = draw(7, 12), draw(7, 12, seed=1)
    right = outputs_and_gradients(lambda x, gate: x * torch.sigmoid(gate), *given)
    assert max(lost(outputs_and_gradients(_Gated.apply, *given), right)) < 1e-14
    assert lost(outputs_and_gradients(lambda *g: gated(*g, one_kernel=True), *given), right) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("cached", [1, 2 * 3 * 12, 1 << 18])
def test_the_gated_norm_and_its_gradients_are_those_of_torch(monkeypatch, cached):
    """In slabs of one row, of two rows and one, and in one."""
    monkeypatch.setattr(row_blocks, "CACHED_ELEMENTS", cached)
    given = draw(7, 3, 12), draw(7, 3, 12, seed=1), draw(12, seed=2)
    right = outputs_and_gradients(lambda x, gate, w: rms_norm(x, (12,), w, EPS) * silu(gate), *given)
    for one_kernel in (True, False):
        found = outputs_and_gradients(partial(gated_norm, eps=EPS, one_kernel=one_kernel), *given)
        assert max(lost(found, right)) < 1e-14
    part = given[1].repeat(1, 2, 1)[:, :3]  # of a wider projection, with gaps between rows
    assert not part.is_contiguous() and torch.equal(gated_norm(given[0], part, given[2], EPS), found[0])


def test_a_gated_norm_of_no_rows():
    x = torch.zeros(0, 3, 12, requires_grad=True)
    weight = torch.ones(12, requires_grad=True)
    gated_norm(x, x, weight, EPS).sum().backward()
    assert weight.grad is not None and not weight.grad.any()


KERNELS = {
    "gated_norm_forward": (
        gated_norm_forward,
        (draw(256, 2, 128), draw(256, 2, 128, seed=1), draw(128, seed=2)),
        (EPS,),
    ),
    "gated_norm_backward": (
        gated_norm_backward,
        (draw(256, 2, 128), draw(256, 2, 128, seed=1), draw(256, 2, 128, seed=2), draw(128, seed=3)),
        (EPS,),
    ),
    "offset_norm": (offset_norm, (draw(512, 1, 256), draw(256, seed=1)), (EPS, 1.0)),
    "norm_backward": (
        norm_backward,
        (draw(512, 1, 256), draw(512, 1, 256, seed=1), draw(256, seed=2), draw(512, 1, 1, seed=3).abs()),
        (1.0,),
    ),
    "gate_forward": (gate_forward, (draw(512, 256), draw(512, 256, seed=1)), ()),
    "gate_backward": (gate_backward, (draw(512, 256), draw(512, 256, seed=1), draw(512, 256, seed=2)), ()),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_compiler_makes_one_kernel_that_rounds_only_its_result(name):
    kernel, exact, numbers = KERNELS[name]
    assert isinstance(kernel, Fused)
    rounded = [tensor.bfloat16() for tensor in exact]
    right = kernel.op_by_op(*(tensor.double() for tensor in rounded), *numbers)
    found, (code,) = run_and_get_code(kernel.compiled, *rounded, *numbers)
    assert code.count("async_compile.cpp") == 1
    right, found = ((t,) if isinstance(t, torch.Tensor) else t for t in (right, found))
    assert found[0].dtype == torch.bfloat16
    assert max(lost(list(found), list(right))) < 2**-8


def test_the_gradient_of_a_weight_is_a_sum_over_rows():
    grad, x, scale = draw(5, 1, 12), draw(5, 1, 12, seed=1), draw(5, 1, 1, seed=2)
    expected = torch.einsum("rad,rad,rab->d", grad, x, scale)
    torch.testing.assert_close(weight_gradient(grad, x, draw(12), scale), expected, rtol=1e-13, atol=1e-13)
