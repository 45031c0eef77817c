"""The learning rate of every step: numbers worked out by hand, and torch's own schedules."""

import dataclasses

import pytest
import torch

from isoloss.engine.config.schema import OptimConfig
from isoloss.engine.step.optimizer import learning_rate

ROOT = 2**0.5 / 2
# lr 9, min_lr 1: what is above min_lr is 8 times the shape. 3 steps of warm-up, then 8 in which the shape falls.
TABLE = {
    "constant": [3, 6, 9] + [9] * 8,
    "linear": [3, 6, 9] + [9, 8, 7, 6, 5, 4, 3, 2],
    # (1 + cos(pi k / 8)) / 2: at k = 0, 2, 4, 6 the cosine is 1, 1/sqrt 2, 0 and -1/sqrt 2.
    "cosine": [3, 6, 9] + [9, None, 5 + 4 * ROOT, None, 5, None, 5 - 4 * ROOT, None],
}


@pytest.mark.parametrize("schedule", TABLE)
def test_the_table_worked_out_by_hand(schedule):
    optim = OptimConfig(lr=9.0, min_lr=1.0, warmup_steps=3, schedule=schedule)
    for step, rate in enumerate(TABLE[schedule]):
        if rate is not None:
            assert learning_rate(step, optim, 11) == pytest.approx(rate, rel=1e-14), step
    # It would arrive at min_lr one step after the last, and stays there.
    last = 9 if schedule == "constant" else 1
    assert [learning_rate(step, optim, 11) for step in (11, 12, 1000)] == [last] * 3


@pytest.mark.parametrize("min_lr", (0.0, 0.3))
def test_cosine_and_linear_are_torchs(min_lr):
    for schedule in ("cosine", "linear"):
        optim = OptimConfig(lr=2.0, min_lr=min_lr, schedule=schedule)
        inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
        theirs = {
            "cosine": lambda of: torch.optim.lr_scheduler.CosineAnnealingLR(of, T_max=13, eta_min=min_lr),
            "linear": lambda of: torch.optim.lr_scheduler.LinearLR(of, 1.0, min_lr / 2.0, total_iters=13),
        }[schedule](inner)
        for step in range(13):
            assert learning_rate(step, optim, 13) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
            inner.step()
            theirs.step()


def test_runs_of_the_warm_up_alone_and_of_one_step():
    optim = OptimConfig(lr=8.0, warmup_steps=4)
    assert [learning_rate(step, optim, 4) for step in range(4)] == [2, 4, 6, 8]
    assert [learning_rate(step, optim, 2) for step in range(2)] == [2, 4]  # cut short, not squeezed
    assert learning_rate(0, dataclasses.replace(optim, warmup_steps=0), 1) == 8
