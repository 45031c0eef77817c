"""What rank 0 does for all: its result, or its failure, on every rank."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from isoloss.parallel import UserError
from isoloss.parallel.collectives import gather_objects
from isoloss.parallel.launch import host_group

# The others wait for rank 0 as long as it takes; if it dies, their connections to it tell them at once.
PATIENCE = timedelta(days=7)

Result = TypeVar("Result")


def whole(result: Result) -> Result:
    """What other ranks get of a result, unless something is said."""
    return result


def is_main() -> bool:
    """Whether this rank writes files and prints what the user reads."""
    return dist.get_rank() == 0


class RankZero:
    """Calls made on rank 0 alone, over a gloo group of the whole world: waiting for servers or rewards must neither
    trip the time limit of the training's groups nor mix with their collectives.

    The constructor is collective over the world.

    explain: makes of an exception what the user should see.
    patient: the context in which a rank may wait for any time, such as `watchdog.patient`.
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
        """call() on rank 0; what it raised, explained. None on the other ranks. Not collective."""
        return self.attempt_here(call) if self.here else None

    def attempt_here(self, call: Callable[[], Any]) -> Exception | None:
        """call() on this rank, whichever it is; what it raised, explained. Not collective."""
        try:
            call()
        except Exception as error:
            return self._explain(error)
        return None

    def agree(self, failure: Exception | None) -> Exception | None:
        """The failure of the first rank that has one, on every rank. Collective over the world."""
        with self._patient():
            failures = gather_objects(_told(failure), self.group)
        for rank, told in enumerate(failures):
            if told is not None:
                return failure if rank == dist.get_rank() else _heard(told, rank)
        return None

    def run(self, call: Callable[[], Result], shown: Callable[[Result], Result] = whole) -> Result:
        """`compute`, where call() waits for servers or rewards, which have limits of their own."""
        with self._patient():
            return self.compute(call, shown)

    def compute(self, call: Callable[[], Result], shown: Callable[[Result], Result] = whole) -> Result:
        """call() on rank 0; its result, or its UserError, on every rank. Collective over the world.

        shown: what the other ranks get of the result.
        """
        results: list[Result] = []
        failure = self.attempt(lambda: results.append(call()))
        if self.group.size() > 1:
            outcome: list[Any] = [([shown(result) for result in results], _told(failure))]
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        if failure is not None:
            raise failure
        if self.here:
            return results[0]
        results, told = outcome[0]
        if told is not None:
            raise _heard(told, 0)
        return results[0]

    def meet(self) -> None:
        """Wait until every rank is here. Collective over the world."""
        with self._patient():
            dist.barrier(group=self.group)

    def close(self) -> None:
        dist.destroy_process_group(self.group)


def _told(failure: Exception | None) -> tuple[bool, str] | None:
    """What other ranks hear of a failure: an exception itself need not travel."""
    return None if failure is None else (isinstance(failure, UserError), str(failure))


def _heard(told: tuple[bool, str], rank: int) -> Exception:
    is_user_error, message = told
    return UserError(message) if is_user_error else RuntimeError(f"rank {rank} failed: {message}")
