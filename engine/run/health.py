"""Warns of a run that learns nothing, or something odd, by the rows of its metrics.

A check looks at the row of a step, as metrics.jsonl has it, and gives a line with the key that helps, or None.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Check = Callable[[Row], str | None]
AGAIN = 50  # steps between two warnings of what lasts
DEAD_STEPS = 3  # in a row: a single mini-batch may have a gradient of 0 by chance


@dataclass(frozen=True)
class Watched:
    """What is watched in a run, besides what is in every run.

    varied: whether the rewards of a step's batch differ, so that there is something to learn.
    """

    varied: Callable[[Row], bool] = lambda row: True
    checks: tuple[Check, ...] = ()


class Health:
    """Every check's line at the first step that it is given for, and again every AGAIN steps while it lasts.

    earlier: rows of the steps that a resumed run has done, which checks compare with and the summary counts.
    """

    def __init__(self, watched: Watched, earlier: Iterable[Row] = ()):
        self._varied = watched.varied
        self._checks = (DeadGradient(watched.varied), no_learning_rate, *watched.checks)
        self._told: dict[int, int] = {}  # the step, by the number of the check
        self._steps, self._idle = 0, Counter[str]()
        for row in earlier:
            self._look(row)

    def warnings(self, step: int, row: Row) -> list[str]:
        """Lines for the user after a step."""
        lines = []
        for number, line in self._look(row).items():
            if step - self._told.get(number, -AGAIN) >= AGAIN:
                self._told[number] = step
                lines.append(f"step {step}: warning: {line}")
        return lines

    def summary(self) -> list[str]:
        """A line about the steps that learned nothing from their samples, where there were any."""
        if not self._idle:
            return []
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self._idle.most_common())
        return [f"warning: {self._idle.total():,} of {self._steps:,} steps learned nothing: {reasons}"]

    def _look(self, row: Row) -> dict[int, str]:
        self._steps += 1
        if reason := idle(row, self._varied):
            self._idle[reason] += 1
        answers = {number: check(row) for number, check in enumerate(self._checks)}
        return {number: line for number, line in answers.items() if line is not None}


def idle(row: Row, varied: Callable[[Row], bool]) -> str | None:
    """Why a step learned nothing from its samples."""
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
    """The gradient is 0 though there is something to learn."""

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
