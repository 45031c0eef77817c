"""Groups of sessions in flight: submit what agents ask, wait, abort for an update of the weights, save and restore."""

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace

import torch

from isoloss.engine.rl.agents.agents import Agents
from isoloss.engine.rl.backends.protocol import CompletionLost, RolloutBackend, failure_of
from isoloss.engine.rl.in_flight import Asked, Choice, InFlight, from_state, to_state
from isoloss.engine.rl.reward.scoring import Arrivals
from isoloss.engine.rl.trajectory import Completion, Prompt, Request, Sampling, Trajectory


@dataclass(eq=False)
class PendingSessions:
    """A group whose sessions are in progress; see `PendingGroup`."""

    prompt: Prompt
    ids: tuple[str, ...]
    completions: dict[str, Trajectory] = field(default_factory=dict)
    place: int | None = None

    @property
    def whole(self) -> bool:
        return self.place is not None


class Gathered(Arrivals):
    """Sessions of a group that have ended, until all of them have."""

    def expect(self, prompt: Prompt, ids: Sequence[str]) -> PendingSessions:
        return PendingSessions(prompt, tuple(ids))

    def take(self, groups: Sequence[PendingSessions]) -> list[list[Trajectory]]:
        return [[group.completions[id] for id in group.ids] for group in groups]

    def add(self, completion: Completion) -> None:
        raise NotImplementedError("completions of sessions go to Agents.answered")

    def place(self) -> int:
        """Return the number of groups that became whole before."""
        return next(self._places)

    def fail(self, error: Exception) -> None:
        """Have `wait` raise this error."""
        self._failure = error
        self.wake()


class SessionFlight(InFlight):
    """The sessions in flight. What they ask waits while the weights are updated: from `abort` to `begin`."""

    def __init__(self, backend: RolloutBackend, agents: Agents, sampling: Sampling):
        self._gathered = Gathered()
        super().__init__(backend, self._gathered, sampling)
        self._agents = agents
        self._gate = threading.RLock()  # for the three below
        self._open = False
        self._unanswered: dict[str, tuple[Request, int]] = {}  # by name: requests, and the most tokens of the answer
        self._lost = False  # whether a request was lost with its servers since `begin`
        self._begun: set[str] = set()
        self._records: dict[str, dict[str, tuple[Sequence[int], Completion]]] = {}  # of a checkpoint, by session

    def begin(self, asked: Asked) -> None:
        """Begin the sessions that are not in progress, and submit what was asked meanwhile."""
        self._expect(asked)
        with self._gate:
            self._open, self._lost = True, False
            for name in self._unanswered:
                self._ask(name)
        for group in self._groups.values():
            for id in group.ids:
                if id not in self._begun:
                    self._begun.add(id)
                    self._agents.begin(id, group.prompt, self, self._records.pop(id, {}))

    def goal(self, choice: Choice) -> Future[None]:
        def stuck() -> bool:
            return self._failed or (self._lost and not self._left)

        return self._gathered.when(lambda: stuck() or self._chosen(choice) is not None)

    def take(self, choice: Choice) -> dict[int, list[Trajectory]] | None:
        taken = super().take(choice)
        for trajectory in (each for group in (taken or {}).values() for each in group):
            self._begun.discard(trajectory.id)
        return taken

    def abort(self) -> Future[None]:
        with self._gate:
            self._open = False
        return super().abort()

    def state(self) -> list[tuple]:
        """Return the records of the sessions of groups in flight, and completions that were aborted."""
        saved = []
        for group in self._groups.values():
            for id in group.ids:
                if id in group.completions:
                    turns = group.completions[id].turns
                    record = {turn.completion.id: (turn.prompt_tokens, turn.completion) for turn in turns}
                else:
                    record = self._agents.record(id) or self._records.get(id, {})
                saved += [(id, torch.tensor(read[:]), *to_state(each)) for read, each in record.values()]
        return saved + [(self._of(name), torch.tensor([]), *to_state(each)) for name, each in self._partial.items()]

    def restore(self, asked: Asked, state: Sequence[Sequence]) -> None:
        self._expect(asked)
        for id, read, *rest in state:
            completion = from_state(rest)
            if completion.finish == "abort":
                self._partial[completion.id] = completion
            else:
                self._records.setdefault(id, {})[completion.id] = (tuple(read.tolist()), completion)

    # ---- called by Agents, from its thread --------------------------------------------------------------------------

    def request(self, request: Request, max_new_tokens: int) -> None:
        with self._gate:
            self._unanswered[request.id] = (request, max_new_tokens)
            self._ask(request.id)

    def withdraw(self, name: str) -> None:
        with self._gate:
            self._unanswered.pop(name, None)
            future = self._futures.pop(name, None)
        if future is not None and future.cancel():
            self._partial.pop(name, None)

    def ended(self, trajectory: Trajectory) -> None:
        group = next(group for group in self._groups.values() if trajectory.id in group.ids)
        group.completions[trajectory.id] = trajectory
        if len(group.completions) == len(group.ids):
            group.place = self._gathered.place()
        self._gathered.wake()

    def failed(self, error: Exception) -> None:
        self._gathered.fail(error)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _ask(self, name: str) -> None:
        if self._open and not self._lost and name not in self._futures:
            request, most = self._unanswered[name]
            self._submit(
                replace(request, partial=self._partial.get(name)), replace(self._sampling, max_new_tokens=most)
            )

    def _arrived(self, future: Future[Completion]) -> None:
        failure = failure_of(future)
        if failure is None and future.result().finish != "abort":
            completion = future.result()
            with self._gate:
                self._unanswered.pop(completion.id, None)
                self._futures.pop(completion.id, None)
                self._partial.pop(completion.id, None)
            self._agents.answered(completion)
        elif isinstance(failure, CompletionLost):
            self._lost = True
        with self._lock:
            self._left -= 1
            self._failed |= failure is not None and not isinstance(failure, CompletionLost | CancelledError)
        self._gathered.wake()

    def _of(self, id: str) -> str:
        """Return the session of a request."""
        return id.rsplit("/", 2)[0]
