"""The next row is packed, and on its way to the device, before the backward of the present one is begun."""

import pytest
import torch
from support.ranks import prefetch

LAYOUTS = [(1, {}), (2, {"pp": 2}), (2, {"pp": 2, "vpp": 2})]


@pytest.mark.parametrize(("world", "parallel"), LAYOUTS, ids=["1", "pp2", "pp2+vpp2"])
def test_one_row_is_packed_ahead_and_nothing_else_changes(world, parallel, tiny_hf, pool):
    folder = tiny_hf("llama", num_hidden_layers=4)
    ahead = pool.run(world, prefetch.passed, folder, parallel, False)
    in_turn = pool.run(world, prefetch.passed, folder, parallel, True)
    rows = len(prefetch.LENGTHS)
    for (events, loss, gradients), (_, wanted, wanted_gradients) in zip(ahead, in_turn, strict=True):
        assert [k for what, k in events if what == "pack"] == list(range(rows))
        for k in range(rows - 1):
            behind = events.index(("forward", k)) + 1  # of the first chunk
            assert events[behind] == ("pack", k + 1)
            assert behind < events.index(("backward", k))
        assert loss == wanted
        assert all(torch.equal(a, b) for a, b in zip(gradients, wanted_gradients, strict=True))


@pytest.mark.parametrize(("world", "parallel"), LAYOUTS[1:], ids=["pp2", "pp2+vpp2"])
def test_the_chunks_of_a_rank_share_what_they_upload_of_a_row(world, parallel, tiny_hf, pool):
    for given in pool.run(world, prefetch.uploads, tiny_hf("llama", num_hidden_layers=4), parallel):
        assert len(given) == len(prefetch.LENGTHS) * parallel.get("vpp", 1)
        assert all(row == table for row, table in given)
