"""Calls on rank 0 whose result, or failure, reaches every rank."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from isoloss.parallel import UserError
from isoloss.parallel.collectives import gather_objects
from isoloss.parallel.runtime.process_group import host_group

# Other ranks wait for rank 0 for any time. If rank 0 dies, their connections break at once.
PATIENCE = timedelta(days=7)

Result = TypeVar("Result")


def whole(result: Result) -> Result:
    """Return the result itself: the default of `shown`, so that every rank gets all of a result."""
    return result


def is_main() -> bool:
    """Return True on the rank that writes files and prints for the user."""
    return dist.get_rank() == 0


class RankZero:
    """Runs calls on rank 0 alone, and shares their outcome over a gloo group of the whole world.

    The group is separate because a wait for servers or rewards must neither exceed the time limit of the training's
    groups nor mix with their collectives. The constructor is collective over the world.

    explain: function that turns an exception into the one for the user.
    patient: context in which a rank may wait for any time, such as `watchdog.patient`.
    """

    def __init__(
        self,
        explain: Callable[[Exception], Exception] = lambda error: error,
        patient: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self._explain = explain
        self._patient = patient
        self.group = host_group(PATIENCE)
        self.here = is_main()

    def attempt(self, call: Callable[[], Any]) -> Exception | None:
        """Run call() on rank 0 and return its exception, explained, or None. None on other ranks. Not collective."""
        return self.attempt_here(call) if self.here else None

    def attempt_here(self, call: Callable[[], Any]) -> Exception | None:
        """Run call() on this rank and return its exception, explained, or None. Not collective."""
        try:
            call()
        except Exception as error:
            return self._explain(error)
        return None

    def agree(self, failure: Exception | None) -> Exception | None:
        """Return on every rank the failure of the first rank that has one, else None. Collective over the world."""
        with self._patient():
            messages = gather_objects(_message(failure), self.group)
        for rank, message in enumerate(messages):
            if message is not None:
                return failure if rank == dist.get_rank() else _exception(message, rank)
        return None

    def run(self, call: Callable[[], Result], shown: Callable[[Result], Result] = whole) -> Result:
        """Run `compute` without a time limit, for a call() that waits for servers or rewards with their own limits."""
        with self._patient():
            return self.compute(call, shown)

    def compute(self, call: Callable[[], Result], shown: Callable[[Result], Result] = whole) -> Result:
        """Run call() on rank 0; return its result, or raise its failure, on every rank. Collective over the world.

        shown: function from the result to the part that the other ranks get.
        """
        results: list[Result] = []
        failure = self.attempt(lambda: results.append(call()))
        if self.group.size() > 1:
            outcome: list[Any] = [([shown(result) for result in results], _message(failure))]
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        if failure is not None:
            raise failure
        if self.here:
            return results[0]
        results, message = outcome[0]
        if message is not None:
            raise _exception(message, 0)
        return results[0]

    def meet(self) -> None:
        """Wait until every rank is here. Collective over the world."""
        with self._patient():
            dist.barrier(group=self.group)

    def close(self) -> None:
        dist.destroy_process_group(self.group)


def _message(failure: Exception | None) -> tuple[bool, str] | None:
    """Return a failure for other ranks: True for a UserError, and its text. Not every exception can be pickled."""
    return None if failure is None else (isinstance(failure, UserError), str(failure))


def _exception(message: tuple[bool, str], rank: int) -> Exception:
    is_user_error, text = message
    return UserError(text) if is_user_error else RuntimeError(f"rank {rank} failed: {text}")
