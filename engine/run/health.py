"""Warn of a run that learns nothing, or something odd, by the rows of its metrics, and of ranks that are slow.

A check is a function of the row of a step, as in metrics.jsonl. It returns a line with the key that helps, or None.
"""

import socket
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from isoloss.engine.step.forward_backward import StepMetrics
from isoloss.parallel.collectives import gather_objects

Row = Mapping[str, Any]
Check = Callable[[Row], str | None]
AGAIN = 50  # steps between two warnings of a lasting problem
DEAD_STEPS = 3  # steps in a row, as a single mini-batch may have a gradient of 0 by chance
EVERY = 20  # steps over which ranks are compared, as anything may disturb a single one
FACTOR = 1.5  # seconds of a slow rank over those of the others for the same work
LEAST_SHARE = 0.05  # share of the time that the others wait, below which a slow rank is not reported


@dataclass(frozen=True)
class Watched:
    """The checks of a recipe's runs, in addition to those of every run.

    varied: function that returns whether the rewards of a step's batch differ, so that the step can learn.
    checks: further checks.
    """

    varied: Callable[[Row], bool] = lambda row: True
    checks: tuple[Check, ...] = ()


class Health:
    """Gives the line of every check at the first step of a problem, and again every AGAIN steps while it lasts.

    earlier: rows of the steps that a resumed run has done, for checks that compare steps and for the summary.
    """

    def __init__(self, watched: Watched, earlier: Iterable[Row] = ()):
        self._varied = watched.varied
        self._checks = (DeadGradient(watched.varied), no_learning_rate, *watched.checks)
        self._warned: dict[int, int] = {}  # last step with a warning, by index of the check
        self._steps, self._idle = 0, Counter[str]()
        for row in earlier:
            self._look(row)

    def warnings(self, step: int, row: Row) -> list[str]:
        """Return lines for the user after a step."""
        lines = []
        for number, line in self._look(row).items():
            if step - self._warned.get(number, -AGAIN) >= AGAIN:
                self._warned[number] = step
                lines.append(f"step {step}: warning: {line}")
        return lines

    def summary(self) -> list[str]:
        """Return a line about the steps that learned nothing from their samples, if there were any."""
        if not self._idle:
            return []
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self._idle.most_common())
        return [f"warning: {self._idle.total():,} of {self._steps:,} steps learned nothing: {reasons}"]

    def _look(self, row: Row) -> dict[int, str]:
        self._steps += 1
        if reason := idle(row, self._varied):
            self._idle[reason] += 1
        lines = {number: check(row) for number, check in enumerate(self._checks)}
        return {number: line for number, line in lines.items() if line is not None}


def idle(row: Row, varied: Callable[[Row], bool]) -> str | None:
    """Return why a step learned nothing from its samples, if so."""
    if row["valid_tokens"] == 0:
        return "without a target"
    if row["applied"] == 0:
        return "not applied"
    if row["lr"] == 0:
        return "with a learning rate of 0"
    if not varied(row):
        return "without rewards that differ"
    return "with a gradient of 0" if row["grad_norm"] == 0 else None


class DeadGradient:
    """Checks for a gradient of 0 in spite of targets, and in reinforcement learning of rewards that differ."""

    def __init__(self, varied: Callable[[Row], bool]):
        self._varied, self._steps = varied, 0

    def __call__(self, row: Row) -> str | None:
        dead = row["grad_norm"] == 0 and row["valid_tokens"] > 0 and self._varied(row)
        self._steps = self._steps + 1 if dead else 0
        if self._steps < DEAD_STEPS:
            return None
        return (
            f"the gradient has been 0 for {self._steps} steps, although there are targets: the model has saturated or "
            f"a loss of yours gives no gradient; start again with a lower optim.lr (it is {row['lr']:g} now)"
        )


def no_learning_rate(row: Row) -> str | None:
    return "the learning rate is 0, so no weight changes: set optim.lr" if row["lr"] == 0 else None


# ---- ranks that are slow
# ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """The work of a rank in the last EVERY steps.

    busy: seconds of its micro-batches, before it waits for the gradients of others. Ranks of a tensor-parallel group, a
        pipeline or a context group wait for each other within micro-batches, and are slow together.
    cost: cost of its samples in the plan that balances them.
    """

    busy: float
    cost: float
    host: str


class Stragglers:
    """Measures this rank and compares all. group: all ranks of the world, on the host."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._reset()

    def after_step(self, step: int, metrics: StepMetrics, seconds: float) -> list[str]:
        """Return lines about the last EVERY steps, on every rank. Every EVERY steps one all-gather of objects."""
        self._busy += metrics.busy_seconds
        self._cost += metrics.cost
        self._seconds += seconds
        self._steps += 1
        if self._steps < EVERY or self._group.size() == 1:
            return []
        shares = gather_objects(Share(self._busy, self._cost, socket.gethostname()), self._group)
        lines = [f"steps {step - EVERY + 1} to {step}: {line}" for line in slow_ranks(shares, self._seconds)]
        self._reset()
        return lines

    def _reset(self) -> None:
        self._busy = self._cost = self._seconds = 0.0
        self._steps = 0


def slow_ranks(shares: Sequence[Share], seconds: float) -> list[str]:
    """Return a line per rank that is slow. seconds: duration of the steps."""
    rates = [share.busy / share.cost if share.cost else None for share in shares]
    lines = []
    for rank, (rate, share) in enumerate(zip(rates, shares)):
        others = [other for k, other in enumerate(rates) if k != rank and other is not None]
        if rate is None or not others:
            continue
        usual = statistics.median(others)
        waiting = (share.busy - usual * share.cost) / seconds
        if rate > FACTOR * usual and waiting > LEAST_SHARE:
            lines.append(
                f"rank {rank} on {share.host} is slow: it needs {rate / usual:.1f} times the seconds of the others for "
                f"the same work, so they wait for it {waiting:.0%} of the time; see what else runs there, and its clock"
            )
    return lines
