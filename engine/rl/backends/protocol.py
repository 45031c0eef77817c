"""What the loop asks of a rollout backend, be it a model in this process or a fleet of servers."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.models.mcore.weight_stream import Named, Receives

Bucket = list[Named]
Arrived = Callable[[Completion], object]


def ignore(completion: Completion) -> None:
    """An `Arrived` that nobody waits for."""


class RolloutBackend(Protocol):
    """Every rank holds one and calls the collective methods with the same arguments.

    receives: which ranks `update_weights` needs the tensors on; the others are given empty buckets. "owner" is a
        rank that has them without asking another.
    """

    receives: Receives

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived = ignore
    ) -> Sequence[Completion | None]:
        """One completion a request, in the order of the requests; its outline on ranks but 0. Collective over the
        world.

        arrived: called with each completion that this rank sees end, when it does and from any thread: on rank 0 with
            all of servers, in process on every rank with its own.
        None where a server was lost on the way: the caller sees to the weights (`weight_version`) and asks again.
        Raises UserError where no server can be reached any more.
        """
        ...

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> None:
        """Take over all weights, from Hugging Face names and tensors, as weight version `version`.

        buckets: an iterator that is collective over the world: every rank exhausts it. A backend that fails on the way
        raises on every rank, and never serves a mixture of old and new weights without saying so in `weight_version`.
        """
        ...

    def weight_version(self) -> int | None:
        """The version that all of the backend serves; None where it serves none of ours (a server that was restarted),
        or its servers differ. Collective over the world."""
        ...

    def pause(self) -> None:
        """Stop producing tokens, and keep the requests. From any thread of rank 0."""
        ...

    def resume(self) -> None:
        """Go on after `pause`. From any thread of rank 0."""
        ...

    def abort(self) -> None:
        """End the requests under way: their completions come back with what they have, finish="abort". From any thread
        of rank 0."""
        ...

    def check_health(self) -> None:
        """Raises UserError, on every rank, with the server and the fix. Collective over the world."""
        ...

    def take_counts(self) -> dict[str, int]:
        """What went wrong and was mended since it was last asked for, by the names of metrics; rank 0's count. Enters
        no collective."""
        ...

    def close(self) -> None:
        """Let go of what the backend holds. Collective over the world; twice does no harm."""
        ...


class BesideTraining(RolloutBackend, Protocol):
    """A backend that generates while the trainer trains."""

    def begin(
        self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived
    ) -> Future[Sequence[Completion | None]]:
        """Begin what `generate` does; the result is as its. On rank 0 alone.

        Until that is there nothing but `weight_version` and `abort` may be called.
        """
        ...
