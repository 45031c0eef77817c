"""GlobalLossNormalizer over ranks: any split of the samples, any placement of the masks, the weights of one rank."""

import pytest
import torch
from support.ranks.normalizer import CASES, MASKS, replicated, sharded

SHARES = {2: [[0, 3, 5, 6], [7, 1, 2, 4]], 4: [[5, 0], [2, 4], [], [7, 6, 3, 1]]}  # uneven, out of order, empty
EVERYTHING = list(range(len(MASKS)))


@pytest.fixture(scope="module")
def truth(pool):
    """{case: weights of all samples, counts} on one rank."""
    (by_case,) = pool.run(1, replicated, "1", [EVERYTHING])
    return {case: ([weights[i] for i in EVERYTHING], counts) for case, (weights, counts, _) in by_case.items()}


def owners(ranks, case, index):
    """The weights of a sample on the ranks that have it, in rank order."""
    return [by_case[case][0][index] for by_case in ranks if index in by_case[case][0]]


def total(ranks, case) -> float:
    return sum(float(w.sum()) for by_case in ranks for w in by_case[case][0].values())


@pytest.mark.parametrize(
    ("layout", "shares", "copies"), [("dp2", SHARES[2], 1), ("dp4", SHARES[4], 1), ("ulysses2+dp2", SHARES[2], 2)]
)
def test_whole_masks(pool, truth, layout, shares, copies):
    """A split over dp changes nothing, and context ranks that hold the same samples do not count them again."""
    ranks = pool.run(copies * len(shares), replicated, layout, shares)
    for case in CASES:
        wanted, counts = truth[case]
        for by_case in ranks:
            assert by_case[case][1] == counts, case
            assert by_case[case][2] == ["dp"], case  # one all-reduce, and no other collective
        for index, whole in enumerate(wanted):
            same = owners(ranks, case, index)
            assert len(same) == copies and all(torch.equal(w, whole) for w in same), case
        assert total(ranks, case) == pytest.approx(copies * counts.weight_sum, rel=1e-13), case


@pytest.mark.parametrize(("layout", "shares"), [("ulysses2+dp2", SHARES[2]), ("ulysses4", [EVERYTHING])])
def test_sharded_masks_weigh_like_whole_ones(pool, truth, layout, shares):
    ranks = pool.run(4, sharded, layout, shares)
    for case in CASES:
        wanted, counts = truth[case]
        for by_case in ranks:
            assert by_case[case][1] == counts, case
            assert by_case[case][2] == ["context", "dp"], case
        for index, whole in enumerate(wanted):
            assert torch.equal(torch.cat(owners(ranks, case, index)), whole), case
        assert total(ranks, case) == pytest.approx(counts.weight_sum, rel=1e-13), case
