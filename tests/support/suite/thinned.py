"""Grids of which `make test-all` runs a part, and `make prove-all` (marker slow) the whole."""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pytest


def thinned(rows: Sequence, keep: Callable[[Any], bool]) -> list:
    """`rows` for parametrize; those that are not kept are marked slow."""
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=() if keep(row) else pytest.mark.slow)
        for row in rows
    ]


def covering_pairs(rows: Sequence[tuple]) -> set[tuple]:
    """A few of `rows` (tuples of one length), in which every two values that stand together in any row do so: greedily,
    the row with the most pairs that are still missing."""
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing, chosen = set().union(*pairs.values()), set()
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
