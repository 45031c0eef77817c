"""The promise, whatever is combined: a row of a covering array gives loss and gradients of one rank that computes every
sample whole, in one micro-batch, with plain settings.

The rows (tests/support/covering/rows.txt) hold every two values of kind of model, parallel axes, loss, aggregation,
token budget, recomputation, shared prefixes, optimizer, overlapped reduction and bound of messages between experts;
those of `make prove-all` also every three of kind and two axes. With two of the losses the samples of models with
experts say which of them their tokens go to. Every gradient is compared in fp64; and where the
optimizer is not the plain one, the weights after two steps in fp32.
"""

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.covering import rows as covering
from support.covering import steps
from support.covering.kinds import KINDS, depth, write_model
from support.covering.rows import Row
from support.covering.steps import Found, Trial
from support.covering.trials import samples, trial

from isoloss.parallel import Layout
from isoloss.tools.prove.parity import TOLERANCE, compare, freeze, merge

PAIRS, TRIPLES = covering.read()
MOVED = 1e-3  # of how far a weight came in fp32: steps are small against weights, and their rounding is not


class References:
    """Of one rank with plain settings, made together for all rows of this run that are of a model."""

    def __init__(self, pool, folder: Path, rows: Iterable[Row]):
        self.pool, self.folder, self.rows = pool, folder, list(rows)
        self.frozen = freeze(samples())
        self._made: dict[Trial, tuple[str, Found]] = {}
        self._models: dict[tuple[str, int], Path] = {}

    def model(self, row: Row) -> Path:
        key = row.kind, depth(Layout.parse(row.layout))
        if key not in self._models:
            self._models[key] = write_model(*key, self.folder / f"{row.kind}-{key[1]}")
        return self._models[key]

    def of(self, row: Row) -> tuple[str, Found]:
        asked = self._plain(row)
        if asked not in self._made:
            alike = [other for other in self.rows if self.model(other) == self.model(row)]
            trials = list(dict.fromkeys(map(self._plain, alike)))
            files = [f"{self.model(row)}/reference-{index}.safetensors" for index, _ in enumerate(trials)]
            (found,) = self.pool.run(1, steps.measured, trials, self.frozen, files, True)
            self._made |= dict(zip(trials, zip(files, found), strict=True))
        return self._made[asked]

    def _plain(self, row: Row) -> Trial:
        return trial(row.plain(), self.model(row), stepped=row.optimizer != "plain")

    def check(self, row: Row) -> None:
        file, reference = self.of(row)
        trials = [trial(row, self.model(row), stepped=row.optimizer != "plain")]
        ranks = [of_rank for (of_rank,) in self.pool.run(row.ranks, steps.measured, trials, self.frozen, [file])]
        (step,) = merge([[of_rank.step] for of_rank in ranks])
        against = compare(step, reference.step, TOLERANCE["fp64"])
        assert against.passed, against.reason
        assert step.parameters.keys() == reference.step.parameters.keys()
        assert {of_rank.reruns is None for of_rank in ranks} == {row.messages == "exact"}
        if row.optimizer != "plain":
            assert {name for of_rank in ranks for name in of_rank.moved} == reference.moved.keys()
        for of_rank in ranks:
            for name, (whole, difference) in of_rank.moved.items():
                assert math.sqrt(difference) <= MOVED * math.sqrt(whole), f"{name} after {steps.STEPS} steps"


@pytest.fixture(scope="module")
def references(pool, tmp_path_factory, request) -> References:
    rows = [item.callspec.params["row"] for item in request.node.session.items if item.path == request.path
            and hasattr(item, "callspec")]  # fmt: skip
    return References(pool, tmp_path_factory.mktemp("covering"), rows)


@pytest.mark.parametrize("row", PAIRS, ids=lambda row: row.name)
def test_every_pair(references, row):
    references.check(row)


@pytest.mark.parametrize("row", TRIPLES, ids=lambda row: row.name)
def test_every_triple(references, row):
    references.check(row)


def test_the_rows_hold_what_they_claim():
    """Each is possible, none is there twice, and no two values (no three of kind and axes) that go together are left
    out."""
    rows = [*PAIRS, *TRIPLES]
    assert rows == covering.still_possible(rows) and len(set(rows)) == len(rows)
    assert {pair for row in PAIRS for pair in covering.pairs(row)} == covering.every_pair()
    assert {triple for row in rows for triple in covering.triples(row)} == covering.every_triple()
    assert {row.kind for row in PAIRS} == set(KINDS)
