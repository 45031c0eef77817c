"""What rank 0 does for all is done once, and its result or its failure is everybody's."""

import pytest
from support.ranks import rank0


@pytest.mark.parametrize(
    ("kind", "of_rank_0", "of_others"),
    (
        ("fine", ("", "of rank 0"), ("", "of rank 0")),
        ("user", ("UserError", "spoiled"), ("UserError", "spoiled")),
        ("bug", ("KeyError", "'spoiled'"), ("RuntimeError", "rank 0 failed: 'spoiled'")),
    ),
)
def test_every_rank_hears_it(pool, kind, of_rank_0, of_others):
    assert pool.run(3, rank0.told, kind) == [(*of_rank_0, 1), (*of_others, 0), (*of_others, 0)]


def test_others_are_shown_a_part(pool):
    assert pool.run(3, rank0.told_in_part) == [("whole", "all"), ("wh", "a"), ("wh", "a")]


def test_ranks_agree_on_the_failure_of_the_first(pool):
    """That rank has the exception itself."""
    heard = ("RuntimeError", "rank 1 failed: 'spoiled by 1'")
    assert pool.run(3, rank0.agreed) == [(None, heard), (None, ("KeyError", "'spoiled by 1'")), (None, heard)]
