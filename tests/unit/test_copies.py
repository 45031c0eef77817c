"""Rows that repeat others, exactly and nearly, against sets of shingles that Python compares."""

import numpy as np
import pytest

from isoloss.tools.audit.copies import (
    FEWEST,
    SHINGLE,
    SIMILAR,
    Sketches,
    Tokens,
    exact_copies,
    near_copies,
    shingle_hashes,
)


def tokens_of(rows: list[list[int]]) -> Tokens:
    return Tokens(np.array([t for row in rows for t in row], np.int32), np.cumsum([0, *map(len, rows)]))


def shingles(row: list[int]) -> set[tuple[int, ...]]:
    return {tuple(row[i : i + SHINGLE]) for i in range(max(1, len(row) - SHINGLE + 1))}


def jaccard(a: list[int], b: list[int]) -> float:
    return jaccard_of(shingles(a), shingles(b))


def jaccard_of(a: set, b: set) -> float:
    return len(a & b) / len(a | b)


def edited(row: list[int], edits: int, rng: np.random.Generator) -> list[int]:
    """A copy with single tokens replaced, removed or doubled, each of which takes about SHINGLE shingles."""
    row = list(row)
    for _ in range(edits if len(row) > edits else 0):
        at = int(rng.integers(len(row)))
        row[at : at + 1] = [[], [int(rng.integers(10**6))], [row[at]] * 2][rng.integers(3)]
    return row


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    """Rows of 1 to 119 tokens; two of three are copies of an earlier one with none to three edits."""
    rng, rows = np.random.default_rng(0), []
    while len(rows) < 330:
        if len(rows) % 3 == 0:
            rows.append(rng.integers(0, 5000, int(rng.integers(1, 120))).tolist())
        else:
            rows.append(edited(rows[int(rng.integers(max(0, len(rows) - 30), len(rows)))], int(rng.integers(4)), rng))
    return rows


def test_exact_copies_are_those_of_earlier_rows(rows):
    rows = [*rows, rows[5], [7], [7], rows[5]]
    found = exact_copies(tokens_of(rows)).tolist()
    assert found == [rows.index(row) if rows.index(row) < i else -1 for i, row in enumerate(rows)]
    others = [rows[9], [8], rows[-1]]
    assert exact_copies(tokens_of(others), tokens_of(rows)).tolist() == [rows.index(rows[9]), -1, rows.index(rows[5])]


def check(found: np.ndarray, wanted: list[bool], similarity) -> None:
    """Every row that is found is a near copy, and of 100 near copies 97 are found."""
    assert all(similarity(row, other) >= SIMILAR for row, other in enumerate(found.tolist()) if other >= 0)
    assert sum(wanted) > 60 and sum(wanted) < 0.9 * len(wanted)
    assert sum(found >= 0) >= 0.97 * sum(wanted)


def test_near_copies_are_as_similar_as_sets_of_shingles_say(rows):
    fresh = exact_copies(tokens_of(rows)) < 0
    found = near_copies(Sketches(tokens_of(rows), "rows"), fresh)
    assert not (found[~fresh] >= 0).any() and (found < np.arange(len(rows))).all()
    sets = [*map(shingles, rows)]
    wanted = [
        fresh[i] and any(fresh[j] and jaccard_of(mine, sets[j]) >= SIMILAR for j in range(i))
        for i, mine in enumerate(sets)
    ]
    check(found, wanted, lambda row, other: jaccard(rows[row], rows[other]))


def test_near_copies_in_other_rows(rows):
    rng = np.random.default_rng(1)
    mine = [edited(row, int(rng.integers(1, 3)), rng) for row in rows]
    train = Sketches(tokens_of(rows), "rows")
    counted = np.ones(len(mine), bool)
    counted[::5] = False
    found = near_copies(Sketches(tokens_of(mine), "rows", train.common), counted, train)
    assert (found[::5] == -1).all()
    sets = [*map(shingles, rows)]
    wanted = [
        counted[i] and any(jaccard_of(own, other) >= SIMILAR for other in sets)
        for i, own in enumerate(map(shingles, mine))
    ]
    check(found, wanted, lambda row, other: jaccard(mine[row], rows[other]))


def test_similarity_is_that_of_the_sets(rows):
    sketches = Sketches(tokens_of(rows), "rows")
    for row, other in zip(range(0, 100), range(1, 101)):
        assert sketches.similarity(row, sketches, other) == jaccard(rows[row], rows[other])


def test_a_shingle_is_of_one_row(rows):
    """Two shingles have one hash if and only if they are the same tokens, whatever row comes next."""
    rows = [*rows, [7], [1, 2], [7], [3, 4], [1, 2], [9] * (SHINGLE - 1), [5], [9] * (SHINGLE - 1), [9]]
    hashes, starts = shingle_hashes(tokens_of(rows), 1, len(rows))
    of_rows = [[tuple(row[i : i + SHINGLE]) for i in range(max(1, len(row) - SHINGLE + 1))] for row in rows[1:]]
    in_order = [shingle for of_row in of_rows for shingle in of_row]
    assert len(hashes) == len(in_order)
    assert len({*zip(hashes.tolist(), in_order)}) == len({*hashes.tolist()}) == len({*in_order})
    assert starts.tolist() == np.cumsum([0, *map(len, of_rows[:-1])]).tolist()


def test_a_system_prompt_of_all_rows_makes_no_copies():
    """A hundred of its tokens before ten others: a similarity of 0.83, were it counted."""
    rng, prompt = np.random.default_rng(0), list(range(100))
    rows = [prompt + rng.integers(0, 10**6, 10).tolist() for _ in range(10 * FEWEST)]
    assert jaccard(rows[0], rows[1]) > SIMILAR
    counted = np.ones(len(rows), bool)
    assert (near_copies(Sketches(tokens_of(rows), "rows"), counted) == -1).all()
    rows[7] = rows[3][:-1] + [5, 6, 7]
    assert near_copies(Sketches(tokens_of(rows + [rows[3] + [8]]), "rows"), np.ones(len(rows) + 1, bool))[-1] == 3
    few = near_copies(Sketches(tokens_of(rows[:FEWEST]), "rows"), counted[:FEWEST])
    assert (few[1:] >= 0).all()


def test_rows_of_common_shingles_alone_are_no_copies():
    rows = [list(range(50)) for _ in range(2 * FEWEST)]
    assert (near_copies(Sketches(tokens_of(rows), "rows"), np.ones(len(rows), bool)) == -1).all()
