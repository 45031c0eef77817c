"""Submit groups to a backend, wait for them, abort them for an update of the weights, save and restore them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from isoloss.engine.rl.backends.protocol import CompletionLost, RolloutBackend, all_done, failure_of
from isoloss.engine.rl.trajectory import Completion, Prompt, Request, Sampling, Trajectory

Asked = Mapping[int, tuple[Prompt, Sequence[str]]]  # by draw, the oldest first: the prompt, the ids of its completions


@dataclass(frozen=True)
class Choice:
    """Groups to wait for: all of `needed`, and of the other `draws` those that are whole first; `count` in all."""

    draws: Sequence[int]
    needed: Sequence[int]
    count: int


class Pending(Protocol):
    """A group in flight: its prompt, the ids of its completions, those that are there, and whether all are."""

    prompt: Prompt
    ids: tuple[str, ...]
    completions: dict[str, Any]
    place: int | None

    @property
    def whole(self) -> bool: ...


class Gathers(Protocol):
    """The interface of `Scoring` to groups in flight."""

    def expect(self, prompt: Prompt, ids: Sequence[str]) -> Any: ...
    def add(self, completion: Completion) -> None: ...
    def take(self, groups: Sequence[Any]) -> list[list[Trajectory]]: ...
    def when(self, until: Callable[[], bool]) -> Future[None]: ...
    def wait(self, until: Callable[[], bool]) -> None: ...
    def wake(self) -> None: ...


class InFlight:
    """The groups in flight and their completions so far. On rank 0; not collective."""

    def __init__(self, backend: RolloutBackend, scoring: Gathers, sampling: Sampling):
        self._backend, self._scoring, self._sampling = backend, scoring, sampling
        self._groups: dict[int, Pending] = {}  # by draw
        self._partial: dict[str, Completion] = {}  # completions that were aborted, by id
        self._futures: dict[str, Future[Completion]] = {}  # by id; until `harvest`
        self._lock = threading.Lock()
        self._left = 0  # futures that are not done
        self._failed = False  # whether a request cannot be answered

    def begin(self, asked: Asked) -> None:
        """Submit the completions that these groups lack and that are not in flight."""
        self._expect(asked)
        for group in self._groups.values():
            for id in group.ids:
                if id not in group.completions and id not in self._futures:
                    self._submit(Request(id, group.prompt.tokens, self._partial.get(id)), self._sampling)

    def goal(self, choice: Choice) -> Future[None]:
        """Return a future that is done when `take` need not wait for completions."""
        return self._scoring.when(lambda: self._failed or not self._left or self._chosen(choice) is not None)

    def take(self, choice: Choice) -> dict[int, list[Trajectory]] | None:
        """Return the groups of the choice with their rewards, in the order of their draws; None where servers were lost
        before."""
        self._scoring.wait(lambda: True)  # raises the error of a reward function
        draws = self._chosen(choice)
        if draws is None:
            self.harvest()
            return None
        groups = [self._groups.pop(draw) for draw in draws]
        for id in (id for group in groups for id in group.ids):
            self._futures.pop(id, None)
        return dict(zip(draws, self._scoring.take(groups)))

    def missing(self, choice: Choice) -> tuple[int, int]:
        """Return the number of missing completions of the choice, and the number of all its completions."""
        groups = [self._groups[draw] for draw in choice.draws]
        return sum(len(each.ids) - len(each.completions) for each in groups), sum(len(each.ids) for each in groups)

    def abort(self) -> Future[None]:
        """End the requests in flight; the future is done when they have ended."""
        if self._left:
            self._backend.abort()
        return all_done(list(self._futures.values()))

    def harvest(self) -> None:
        """Keep the partial completions of requests that have ended. Raises what no retry can mend."""
        for id, future in list(self._futures.items()):
            if future.done():
                del self._futures[id]
                failure = failure_of(future)
                if failure is not None and not isinstance(failure, CompletionLost):
                    raise failure
                if failure is None and future.result().finish == "abort":
                    self._partial[id] = future.result()

    def state(self) -> list[tuple]:
        """Return the completions in flight that have tokens, for a checkpoint."""
        return [to_state(completion) for completion in self._known()]

    def restore(self, asked: Asked, state: Sequence[Sequence]) -> None:
        self._expect(asked)
        for completion in map(from_state, state):
            if completion.finish == "abort":
                self._partial[completion.id] = completion
            else:
                self._scoring.add(completion)

    def _submit(self, request: Request, sampling: Sampling) -> None:
        with self._lock:
            self._left += 1
        try:
            future = self._futures[request.id] = self._backend.submit(request, sampling)
        except Exception:
            with self._lock:
                self._left -= 1
            raise
        future.add_done_callback(self._arrived)

    def _arrived(self, future: Future[Completion]) -> None:
        """Take the result of a request. Called from any thread."""
        failure = failure_of(future)
        if failure is None and future.result().finish != "abort":
            self._scoring.add(future.result())
        with self._lock:
            self._left -= 1
            self._failed |= failure is not None and not isinstance(failure, CompletionLost)
        self._scoring.wake()

    def _chosen(self, choice: Choice) -> list[int] | None:
        """Return the draws to take; None while too few are whole."""
        whole = [draw for draw in choice.draws if self._groups[draw].whole]
        others = sorted({*whole} - {*choice.needed}, key=lambda draw: self._groups[draw].place or 0)
        first = others[: choice.count - len(choice.needed)]
        enough = {*whole} >= {*choice.needed} and len(choice.needed) + len(first) == choice.count
        return sorted([*choice.needed, *first]) if enough else None

    def _expect(self, asked: Asked) -> None:
        for draw, (prompt, ids) in asked.items():
            if draw not in self._groups:
                self._groups[draw] = self._scoring.expect(prompt, ids)
        ids = {id for group in self._groups.values() for id in group.ids}
        self._partial = {id: partial for id, partial in self._partial.items() if self._of(id) in ids}

    def _of(self, id: str) -> str:
        """Return the id in a group that the request of this id is for."""
        return id

    def _known(self) -> list[Completion]:
        ids = ((group, id) for group in self._groups.values() for id in group.ids)
        found = (group.completions.get(id) or self._partial.get(id) for group, id in ids)
        return [completion for completion in found if completion is not None]


def to_state(completion: Completion) -> tuple:
    """Return the completion in plain containers and tensors."""
    numbers = torch.tensor(completion.tokens[:]), torch.tensor(completion.logprobs[:], dtype=torch.float64)
    routes = None if completion.routes is None else torch.from_numpy(completion.routes)
    return completion.id, *numbers, torch.tensor(completion.versions[:]), completion.finish, routes


def from_state(state: Sequence) -> Completion:
    id, tokens, logprobs, versions, finish, *rest = state  # older checkpoints end here
    routes = rest[0].numpy() if rest and rest[0] is not None else None
    return Completion(id, tokens.tolist(), logprobs.tolist(), versions.tolist(), finish, routes)
