"""Products with a matrix that oneDNN has laid out, against numpy in fp64."""

import numpy as np
import pytest
import torch

from isoloss.parallel.ops.prepacked import PackedMatrix


@pytest.mark.parametrize("shape", [(7, 5), (96, 64), (1000, 384)], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 33])
def test_a_product_is_that_of_numpy(shape, rows):
    """Of any number of rows, whatever it was laid out for; with a bias too, and of rows with gaps between."""
    random = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(shape, generator=random), torch.randn(shape[0], generator=random)
    x = torch.randn(rows, 1, shape[1], generator=random)
    exact = x.numpy().astype(np.float64) @ weight.numpy().astype(np.float64).T
    with torch.inference_mode():
        packed = PackedMatrix(weight, 16)
        for found, wanted in (
            (packed.product(x), exact),
            (packed.product(x, bias), exact + bias.numpy()),
            (packed.product(x.expand(-1, 3, -1)[:, 1]), exact[:, 0]),
        ):
            assert found.dtype == torch.float32
            np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=1e-4)


def test_only_fp32_matrices_of_a_cpu_are_packed():
    assert PackedMatrix.serves(torch.zeros(2, 2))
    assert not PackedMatrix.serves(torch.zeros(2, 2, dtype=torch.float64))
    assert not PackedMatrix.serves(torch.zeros(2, 2, dtype=torch.bfloat16))
    assert not PackedMatrix.serves(torch.zeros(2, 2, device="meta"))
