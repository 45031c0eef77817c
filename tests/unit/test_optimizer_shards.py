"""A run of a flattened tensor as blocks of the tensor."""

import itertools

import numpy as np
import pytest

from isoloss.models.mcore.optimizer_shards import blocks


@pytest.mark.parametrize("shape", [(7,), (4, 5), (1, 6), (6, 1), (3, 2, 4), (2, 1, 3, 2)])
def test_blocks_make_up_the_run_in_its_order(shape):
    whole = np.arange(np.prod(shape)).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(whole.size + 1), 2):
        found = list(blocks(shape, start, stop))
        parts = [whole[tuple(slice(at, at + n) for at, n in zip(*block))] for block in found]
        assert all(part.shape == sizes and part.size for part, (_, sizes) in zip(parts, found))
        assert [number for part in parts for number in part.ravel()] == list(range(start, stop))
        assert len(found) <= 2 * len(shape) - 1
