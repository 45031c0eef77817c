"""The interface between the loop and a rollout backend: a model in this process or a fleet of servers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from itertools import count

from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.models.mcore.weight_stream import Named, Receives
from isoloss.parallel import UserError
from isoloss.parallel.rank0 import RankZero

Bucket = list[Named]
Arrived = Callable[[Completion], object]


class CompletionLost(Exception):
    """A request was lost with its servers. The caller sees to the weights (`weight_version`) and submits it again."""


def ignore(completion: Completion) -> None:
    """Do nothing with a completion."""


class RolloutBackend(ABC):
    """Requests go in on rank 0, one at a time and from any thread; every rank holds a backend and takes part in
    `serve`.

    receives: ranks on which `update_weights` needs the tensors; the others are given empty buckets. "owner" is a rank
        that holds them without asking another.
    takes_adapter: whether `update_weights` takes the factors of an adapter in place of all weights.
    rank0: makes calls on rank 0 for all ranks.
    """

    receives: Receives
    takes_adapter: bool = False
    rank0: RankZero

    @abstractmethod
    def submit(self, request: Request, sampling: Sampling) -> Future[Completion]:
        """Ask for one completion. From any thread of rank 0; enters no collective.

        The request joins those in flight. The tokens that it samples depend on its id and its `sampling`, not on other
        requests or on their order. Servers begin at once, a model in this process while `serve` runs.

        The future raises CompletionLost where its servers were lost, and RuntimeError where a model failed. UserError,
        for a request that cannot be answered, is raised here or by the future.
        `Future.cancel` withdraws a request that is not done; a server may finish it all the same.
        """

    @abstractmethod
    def serve(self, goal: Future | None) -> None:
        """Produce tokens until `goal` is done. Collective over the world.

        goal: future on rank 0; ignored on other ranks. Other requests then stay in flight. A failure of `goal` is not
            raised here.
        Raises UserError on every rank where no server can be reached any more, RuntimeError where a model failed.
        """

    @abstractmethod
    def update_weights(self, buckets: Iterable[Bucket], version: int) -> None:
        """Take over all weights, from Hugging Face names and tensors, as weight version `version`.

        buckets: an iterator that is collective over the world: every rank exhausts it. A backend that fails on the way
        raises on every rank, and never serves a mixture of old and new weights without saying so in `weight_version`.
        """

    @abstractmethod
    def weight_version(self) -> int | None:
        """Return the version that all of the backend serves; None where it serves another run's weights (a server that
        was restarted), or its servers differ. Collective over the world."""

    @abstractmethod
    def pause(self) -> None:
        """Stop producing tokens until `resume`, and keep the requests; `serve` waits. From any thread of rank 0."""

    @abstractmethod
    def resume(self) -> None:
        """Go on after `pause`. From any thread of rank 0."""

    @abstractmethod
    def abort(self) -> None:
        """End the requests in flight: their completions hold the tokens so far, finish="abort". From any thread of
        rank 0. A model in this process obeys while `serve` runs."""

    @abstractmethod
    def check_health(self) -> None:
        """Raises UserError, on every rank, with the server and the fix. Collective over the world."""

    @abstractmethod
    def take_counts(self) -> dict[str, int]:
        """Return how many faults were mended since the last call, by the names of metrics; rank 0's count. Enters no
        collective."""

    @abstractmethod
    def close(self) -> None:
        """Free what the backend holds; requests in flight fail. Collective over the world; twice does no harm."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived = ignore
    ) -> Sequence[Completion | None]:
        """Submit requests and wait for all of them: their completions, in the order of the requests; outlines on ranks
        but 0. Collective over the world.

        arrived: function that rank 0 calls with each completion that was not aborted, when it ends and from any thread.
        None for a lost completion. Raises UserError as the futures do, after the other requests were aborted, and as
        `submit` does, after they were withdrawn.
        """
        futures: list[Future[Completion]] = []

        def ended(future: Future[Completion]) -> None:
            failure = failure_of(future)
            if isinstance(failure, UserError):
                self.abort()  # the other completions would be thrown away: let them end soon
            elif failure is None and future.result().finish != "abort":
                arrived(future.result())

        def submit() -> None:
            try:
                for request in requests:
                    futures.append(self.submit(request, sampling))
                    futures[-1].add_done_callback(ended)
            except Exception:
                for future in futures:
                    future.cancel()
                raise

        self.rank0.compute(submit)
        self.serve(all_done(futures))
        return self.rank0.run(lambda: [completion_of(future) for future in futures], outlines)


def completion_of(future: Future[Completion]) -> Completion | None:
    """Return the completion of a future that is done, None if it was lost. Raises any other failure."""
    return None if isinstance(failure_of(future), CompletionLost) else future.result()


def failure_of(future: Future) -> BaseException | None:
    """Return the exception of a future that is done: CancelledError if it was withdrawn, None if it has a result."""
    return CancelledError() if future.cancelled() else future.exception()


def outlines(completions: Sequence[Completion | None]) -> list[Completion | None]:
    return [completion and completion.outline() for completion in completions]


def all_done(futures: Sequence[Future]) -> Future[None]:
    """Return a future that is done once all of these are, failed or not; at once for none."""
    goal: Future[None] = Future()
    done = count(1)

    def one_more(future: Future) -> None:
        if next(done) == len(futures):
            goal.set_result(None)

    if not futures:
        goal.set_result(None)
    for future in futures:
        future.add_done_callback(one_more)
    return goal
