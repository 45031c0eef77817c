"""Rewards of whole groups while others are generated."""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from isoloss.engine.rl.reward.rewarder import Scored
from isoloss.engine.rl.trajectory import Completion, Prompt, Trajectory

CLOSE_SECONDS = 5.0  # for the rewards under way when a run ends


class GivesRewards(Protocol):
    """The interface of `Rewarder`.

    whole_batch: a function wants all completions of a batch in one call.
    """

    @property
    def whole_batch(self) -> bool: ...

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Scored]: ...


@dataclass(eq=False)
class PendingGroup:
    """A group that is being generated. ids: of its completions, in their order. place: of all groups that became whole,
    the how manieth; None until then."""

    prompt: Prompt
    ids: tuple[str, ...]
    completions: dict[str, Completion] = field(default_factory=dict)
    scored: list[Scored] | None = None
    place: int | None = None

    @property
    def whole(self) -> bool:
        return self.place is not None

    def trajectories(self) -> list[Trajectory]:
        assert self.scored is not None, "it was waited for"
        return [
            Trajectory.of_one_turn(
                self.prompt, self.completions[id], each.text, each.reward, each.parts, each.error, each.timed_out
            )
            for id, each in zip(self.ids, self.scored, strict=True)
        ]


class Arrivals:
    """Waits, in one thread, for what other threads bring."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._goals: list[tuple[Callable[[], bool], Future[None]]] = []
        self._places = itertools.count()
        self._failure: Exception | None = None

    def when(self, until: Callable[[], bool]) -> Future[None]:
        """Return a future that is done once `until()` holds, looked at after every change, or a reward failed."""
        goal: Future[None] = Future()
        with self._changed:
            self._goals.append((until, goal))
        self.wake()
        return goal

    def wake(self) -> None:
        """Have `wait` and `when` look again."""
        with self._changed:
            self._changed.notify_all()
            due = [each for each in self._goals if self._failure is not None or each[0]()]
            self._goals = [each for each in self._goals if each not in due]
        for _, goal in due:
            goal.set_result(None)

    def wait(self, until: Callable[[], bool]) -> None:
        """Until that is so, looked at after every change. Raises what a reward function made of a group."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or until())
            if self._failure is not None:
                raise self._failure


class Scoring(Arrivals):
    """Gives each group its rewards once its last completion is there, in a thread, while others are generated. Where a
    reward function wants the whole batch, all are given when they are asked for. On rank 0.

    What a group is given does not depend on which other groups are whole.
    """

    def __init__(self, rewarder: GivesRewards):
        super().__init__()
        self._rewarder = rewarder
        self._of: dict[str, PendingGroup] = {}  # by the id of each completion
        self._waiting: list[PendingGroup] = []  # whole, without rewards
        self._closed = False
        self._thread: threading.Thread | None = None

    def expect(self, prompt: Prompt, ids: Sequence[str]) -> PendingGroup:
        """A group that `add` will get the completions of."""
        group = PendingGroup(prompt, tuple(ids))
        with self._changed:
            self._of |= dict.fromkeys(group.ids, group)
            if self._thread is None and not self._rewarder.whole_batch:
                self._thread = threading.Thread(target=self._work, name="rewards", daemon=True)
                self._thread.start()
        return group

    def add(self, completion: Completion) -> None:
        """From any thread. Twice does no harm."""
        with self._changed:
            group = self._of[completion.id]
            group.completions[completion.id] = completion
            if not group.whole and len(group.completions) == len(group.ids):
                group.place = next(self._places)
                if not self._rewarder.whole_batch:
                    self._waiting.append(group)
        self.wake()

    def take(self, groups: Sequence[PendingGroup]) -> list[list[Trajectory]]:
        """The completions of these groups, which are whole, with their rewards; they are forgotten here."""
        if self._rewarder.whole_batch:
            self._score(groups)
        self.wait(lambda: all(group.scored is not None for group in groups))
        with self._changed:
            for group in groups:
                for id in group.ids:
                    del self._of[id]
        return [group.trajectories() for group in groups]

    def close(self) -> None:
        """End the thread, which may be in the middle of rewards."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    return
                groups, self._waiting = self._waiting, []
            try:
                self._score(groups)
            except Exception as error:
                self._failure = error
                self.wake()
                return

    def _score(self, groups: Sequence[PendingGroup]) -> None:
        prompts = [group.prompt for group in groups for _ in group.ids]
        completions = [group.completions[id] for group in groups for id in group.ids]
        scored = iter(self._rewarder.score(prompts, completions))
        with self._changed:
            for group in groups:
                group.scored = list(itertools.islice(scored, len(group.ids)))
            self._changed.notify_all()
