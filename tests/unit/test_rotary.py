"""Rotations of queries and keys against complex numbers in numpy, forth and back, op by op and as one kernel."""

from unittest import mock

import numpy as np
import pytest
import torch
from support.models.compiled_kernels import as_on_a_gpu

from isoloss.models.mcore.layers import rotary

INV_FREQ = torch.tensor([1.0, 0.3, 0.01, 0.002])
POSITIONS = torch.tensor([0, 1, 2, 0, 1, 7, 500, 70000])
WIDTHS = (8, 11)  # all channels of a head, or some of them


def table(dtype: torch.dtype) -> torch.Tensor:
    return rotary.rotary_table(POSITIONS, INV_FREQ, 1.3, dtype)


def heads(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Not contiguous, as a slice of what the projection gives."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 1, 3, width + 2, generator=generator, dtype=torch.float64).to(dtype)[..., :width]


def by_complex_numbers(x: np.ndarray, *, interleaved: bool) -> np.ndarray:
    """The pairs as complex numbers, times 1.3 exp(i angle), of angles in fp32."""
    angles = (POSITIONS.numpy().astype(np.float32)[:, None] * INV_FREQ.numpy()).astype(np.float64)
    turns = 1.3 * np.exp(1j * angles)[:, None, None]
    if interleaved:
        kept, turned = x[..., :-8], x[..., -8:]
        turned = (turned[..., 0::2] + 1j * turned[..., 1::2]) * turns
        return np.concatenate([kept, turned.real, turned.imag], -1)
    turned = (x[..., :4] + 1j * x[..., 4:8]) * turns
    return np.concatenate([turned.real, turned.imag, x[..., 8:]], -1)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rotate", (rotary.rotate, rotary.rotate_interleaved))
def test_it_is_a_product_of_complex_numbers(rotate, width):
    x = heads(width, torch.float64).requires_grad_()
    turned = rotate(x, table(torch.float64), one_kernel=True)
    expected = by_complex_numbers(x.numpy(force=True), interleaved=rotate is rotary.rotate_interleaved)
    np.testing.assert_allclose(turned.numpy(force=True), expected, rtol=0, atol=1e-6)  # cosine and sine are fp32
    assert torch.autograd.gradcheck(lambda x: rotate(x, table(torch.float64), one_kernel=True), (x,))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "function",
    (rotary.turn_halves, rotary.turn_halves_back, rotary.turn_neighbours, rotary.turn_neighbours_back),
    ids=lambda function: function.__name__,
)
def test_a_compiler_makes_one_kernel_that_loses_no_more(function, width):
    """With the fp32 table of a GPU, in bf16; op by op the table is rounded too."""
    x = heads(width, torch.bfloat16)
    exact = function.op_by_op(x.double(), table(torch.float64))
    found, kernels = as_on_a_gpu(function, x, table(torch.float32))
    op_by_op = function.op_by_op(x, table(torch.bfloat16))
    assert kernels == 1
    assert found.dtype == op_by_op.dtype == torch.bfloat16 and found.is_contiguous()
    lost, lost_op_by_op = ((got.double() - exact).abs() for got in (found, op_by_op))
    assert lost.max() <= 2**-8 * exact.abs().max()
    assert lost.max() <= lost_op_by_op.max() and lost.mean() < 0.7 * lost_op_by_op.mean()


def test_megatron_rotates_its_own_models_by_angles():
    """The patch answers to isoloss's configuration alone: the same rotation, bit by bit, in either form."""
    from megatron.core.transformer import attention
    from megatron.core.transformer.transformer_config import TransformerConfig

    import isoloss.models.mcore.build  # noqa: F401  it applies the patches
    from isoloss.models.mcore.layer_config import LayerConfig

    settings = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "use_cpu_initialization": True}
    angles = torch.outer(POSITIONS.float(), INV_FREQ).repeat(1, 2)[:, None, None]
    ours = rotary.rotary_table(POSITIONS, INV_FREQ, 1.0, torch.bfloat16)
    for width in WIDTHS:
        found, grads = [], []
        for config, given in ((TransformerConfig(**settings), angles), (LayerConfig(**settings), ours)):
            x = heads(width, torch.bfloat16).requires_grad_()
            turned = attention.apply_rotary_pos_emb(x, given, config=config, cp_group=mock.Mock())
            turned.backward(heads(width, torch.bfloat16).flip(0))
            found.append(turned)
            grads.append(x.grad)
        assert torch.equal(*found) and torch.equal(*grads)
