"""Sums over ranks: of gradients whatever view they come through, and without a change of what was given."""

import pytest
import torch
from support.ranks.collectives import gradient_of_a_region, parts

# By hand, of two ranks: what each adds to the gradient, rank 1 twice as much where it multiplies.
WANTED = {
    "product": torch.full((2, 3), 3.0),
    "expanded": torch.full((2, 3), 2.0),
    "transposed": 3 * torch.arange(6.0).view(3, 2).T,
}


@pytest.mark.parametrize("view", WANTED)
def test_gradients_are_summed_whatever_their_strides(pool, view):
    for gradient in pool.run(2, gradient_of_a_region, view):
        torch.testing.assert_close(gradient, WANTED[view].double(), rtol=0, atol=0)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_sum_of_parts_leaves_what_was_given(pool, transposed):
    for rank, (given, total) in enumerate(pool.run(2, parts, transposed)):
        assert (given == rank + 1).all() and (total == 3).all() and total.shape == given.shape
