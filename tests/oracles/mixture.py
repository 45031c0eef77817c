"""Which row of weighted files each draw is, seat by seat in exact fractions."""

from collections.abc import Mapping
from fractions import Fraction

import numpy as np


def draws(files: Mapping[str, tuple[int, int]], count: int, seed: int) -> list[str]:
    """The rows, as NAME:LINE, of the first draws from files of (rows, weight).

    Seat after seat goes to the largest weight / (2 seats so far + 1), the first of equals. Each file has a permutation
    of its own for each epoch of its own.
    """
    taken, rows = dict.fromkeys(files, 0), []
    for _ in range(count):
        name = max(files, key=lambda name: Fraction(files[name][1], 2 * taken[name] + 1))
        epoch, place = divmod(taken[name], files[name][0])
        order = np.random.default_rng([seed, epoch, list(files).index(name)]).permutation(files[name][0])
        rows.append(f"{name}:{order[place] + 1}")
        taken[name] += 1
    return rows
