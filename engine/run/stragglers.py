"""A rank that needs longer than the others for the same work keeps all of them waiting: it is named."""

import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from isoloss.engine.step.forward_backward import StepMetrics
from isoloss.parallel.collectives import gather_objects

EVERY = 20  # steps that are looked at together: one of them alone may be disturbed by anything
FACTOR = 1.5  # times the seconds of the others for the same work
LEAST_SHARE = 0.05  # of the time that the others wait, for it to matter


@dataclass(frozen=True)
class Share:
    """What a rank did in the steps under consideration.

    busy: seconds of its micro-batches, before it waits for the gradients of others. Ranks of one tensor-parallel group,
        pipeline or context wait for each other inside of them, and are slow together.
    cost: of its samples, as the plan that balances them has it.
    """

    busy: float
    cost: float
    host: str


class Stragglers:
    """Of this rank. group: of the world, on the host."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._forget()

    def after_step(self, step: int, metrics: StepMetrics, seconds: float) -> list[str]:
        """Lines about the last EVERY steps, on every rank. Collectives: every EVERY steps one all-gather of objects."""
        self._busy += metrics.busy_seconds
        self._cost += metrics.cost
        self._seconds += seconds
        self._steps += 1
        if self._steps < EVERY or self._group.size() == 1:
            return []
        shares = gather_objects(Share(self._busy, self._cost, socket.gethostname()), self._group)
        lines = [f"steps {step - EVERY + 1} to {step}: {line}" for line in slow_ranks(shares, self._seconds)]
        self._forget()
        return lines

    def _forget(self) -> None:
        self._busy = self._cost = self._seconds = 0.0
        self._steps = 0


def slow_ranks(shares: Sequence[Share], seconds: float) -> list[str]:
    """A line for each rank that is slow. seconds: that the steps took."""
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
