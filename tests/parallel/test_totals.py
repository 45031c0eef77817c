"""What a step reports is the same on every rank, and holds every micro-batch of every rank once."""

import pytest
from support.ranks.totals import totals


@pytest.mark.parametrize(
    ("layout", "world", "wanted"),
    (
        ("dp2", 2, [2 * 11, 2 * 100, 1]),
        ("ulysses2", 2, [2 * 11, 2 * 100, 1]),
        ("pp2", 2, [11, 2 * 100, 1]),  # rank 1 is the last stage
        ("dp2+pp2", 4, [2 * 11, 2 * (200 + 300), 3]),  # ranks 2 and 3 are
    ),
)
def test_totals_over_micro_batches_and_ranks(pool, layout, world, wanted):
    assert pool.run(world, totals, layout) == [wanted] * world
