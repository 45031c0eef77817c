"""What a step reports is the same on every rank, and holds every micro-batch of every rank once."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.ranks.totals import totals

from isoloss.engine.step.forward_backward import StepTotals, moments_of
from isoloss.engine.step.losses import Loss, Term
from isoloss.parallel.aggregation import Aggregation


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


def never(inputs):
    raise AssertionError("only the numbers of values count here")


LOSS = Loss(
    (Term(never, Aggregation("token-mean")), Term(never, Aggregation("sum"), name="kl")),
    mean_metrics={"entropy": never},
    max_metrics={"highest": never, "widest": never},
    correlation_metrics={"alike": never},
)


@pytest.mark.parametrize("lost", [(), (3.0,)])
@pytest.mark.parametrize(
    "loss", [LOSS, replace(LOSS, mean_metrics={}), replace(LOSS, max_metrics={}, correlation_metrics={})]
)
def test_totals_are_read_as_they_were_written(loss, lost):
    numbers = iter(np.arange(20.0).tolist())
    of_field = [[next(numbers) for _ in range(size)] for size in StepTotals.sizes(loss)]
    written = StepTotals(*of_field)
    assert [len(each) for each in (written.weight_sums, written.terms, written.magnitude)] == [2, 2, 1]
    assert len(written.means) == len(loss.mean_metrics) and len(written.largest) == len(loss.max_metrics)
    flat = written.flat()
    assert flat == sorted(flat) and written.largest == flat[len(flat) - len(loss.max_metrics) :]
    assert StepTotals.read(loss, [*flat, *lost]) == replace(written, lost=sum(lost))


@pytest.mark.parametrize("tokens", [5, 0])
def test_what_was_observed_has_its_name(tokens):
    x_N, y_N = np.random.default_rng(0).normal(size=(2, tokens))
    moments = [sum_.item() for sum_ in moments_of(torch.from_numpy(x_N), torch.from_numpy(y_N))]
    observed = StepTotals([1.0, 9.0], [2.0, 3.0], [5.0], [7.0], moments, [11.0, 13.0]).observed(LOSS, tokens)
    alike = np.corrcoef(x_N, y_N)[0, 1] if tokens else 1.0
    assert observed == pytest.approx({"entropy": 7 / max(tokens, 1), "highest": 11, "widest": 13, "alike": alike})
