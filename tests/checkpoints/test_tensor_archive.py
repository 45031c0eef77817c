"""What torch.save wrote, found without unpickling it; a tensor that is not its storage in order is refused."""

import io

import pytest
import torch

from isoloss.models.weights.tensor_archive import locate


def saved(tensor: torch.Tensor) -> memoryview:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return memoryview(buffer.getvalue())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 1, 4)])
def test_the_numbers_are_where_it_says(shape, dtype):
    tensor = (10 * torch.randn(shape)).to(dtype)
    archive = saved(tensor)
    found = locate(archive)
    assert (found.dtype, found.shape, found.nbytes) == (dtype, shape, tensor.nbytes)
    data = bytes(archive[found.offset : found.offset + found.nbytes])
    assert data == tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else not data


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.arange(6.0).view(2, 3).T, "strides"),
        (torch.arange(9.0).view(3, 3).T, "strides"),
        (torch.arange(6.0)[2:], "offset|bytes"),
        (torch.arange(6.0)[::2], "strides"),
    ],
    ids=("transposed", "transposed square", "a part", "every second"),
)
def test_views_are_refused(tensor, says):
    with pytest.raises(ValueError, match=says):
        locate(saved(tensor))
