"""Weights that are infinite or NaN are found by one sum, and a sum that is only too large is no reason to refuse."""

import math
from pathlib import Path

import pytest
import torch

from isoloss.models.weights.finite import check_finite, is_finite
from isoloss.parallel.runtime.errors import UserError

NAN, INFINITY = math.nan, math.inf


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("odd", ((NAN,), (INFINITY,), (-INFINITY,), (INFINITY, -INFINITY), (NAN, INFINITY), ()))
def test_as_a_look_at_each_number_finds(odd, dtype):
    largest = torch.finfo(dtype).max
    for scale in (1.0, largest / 4):  # of which the sum is too large for its type
        numbers = (torch.linspace(0.5, 1, 7 * 33, dtype=torch.float64).view(7, 33) * scale).to(dtype)
        for place, value in enumerate(odd):
            numbers[place * 3, 32 - place] = value
        for view in (numbers, numbers.T, numbers[::3]):
            assert is_finite(view) == bool(view.isfinite().all()) == (not odd)


def test_the_line_names_tensor_and_file():
    numbers = torch.tensor([[1.0, NAN], [INFINITY, 2.0]])
    check_finite(numbers[:, :1][:1], "a", Path("f"))
    check_finite(torch.empty(0, 3), "a", Path("f"))
    with pytest.raises(
        UserError, match=r"^a.b in in/model.safetensors holds numbers that are infinite or NaN \(2 of 4\): "
    ):
        check_finite(numbers, "a.b", Path("in/model.safetensors"))
