"""Gated activations against their formulas in plain torch, values and gradients, far beyond where they are clamped."""

import torch
from torch.nn.functional import silu

from isoloss.models.mcore.activations import clamped_swiglu, swiglu


def wide() -> torch.Tensor:
    return (10 * torch.randn(64, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).requires_grad_()


def test_swiglu():
    x = wide()
    torch.testing.assert_close(swiglu(x), silu(x[:, :3]) * x[:, 3:])
    assert torch.autograd.gradcheck(swiglu, (x,))


def test_the_clamped_one_of_gpt_oss():
    """The gate is clamped from above only, the other half from both sides; transformers, modeling_gpt_oss.py."""
    x = wide()
    gate, up = torch.minimum(x[:, :3], torch.tensor(7.0)), x[:, 3:].clip(-7, 7)
    torch.testing.assert_close(clamped_swiglu(x), (up + 1) * (gate / (1 + torch.exp(-1.702 * gate))))
    assert (x[:, :3] < -7).any() and (x[:, :3] > 7).any()
    by_hand = clamped_swiglu(torch.tensor([[-10.0, 1.0]], dtype=torch.float64))
    torch.testing.assert_close(by_hand, torch.tensor([[-20.0 / (1 + 2.718281828459045**17.02)]], dtype=torch.float64))
