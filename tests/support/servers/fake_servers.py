"""A rollout backend without servers, models or tokens that mean anything: a thread makes them."""

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from isoloss.engine.rl.backends.protocol import CompletionLost, RolloutBackend
from isoloss.engine.rl.reward.rewarder import Scored
from isoloss.engine.rl.trajectory import Completion, Prompt, Request, Sampling
from isoloss.engine.step.engine import Engine
from isoloss.models.mcore.weight_stream import Receives

ENGINE = cast(Engine, SimpleNamespace(weight_stream=lambda *_: iter(()), offload=lambda **_: None))


FEW = 2


def length(id: str, most: int) -> int:
    """Of a completion: most are short, a few long."""
    chance = random.Random(id)
    return most if chance.random() < 0.2 else chance.randint(1, max(most // 4, 1))


class FakeServers(RolloutBackend):
    """Each round every request gets a token of the present version; all but the first `quick` of those in flight get
    FEW of them, and then wait until another is submitted or they are aborted. begun: ids of the requests in flight
    together, a list each time that there were none before. fails: how often from now on all that is not complete is
    lost, after a round, as if servers were."""

    receives: Receives = "every rank"

    def __init__(self, quick: int):
        self.version: int | None = None
        self.begun: list[list[str]] = []
        self.healed = 0
        self.fails = 0
        self._quick = quick
        self._changed = threading.Condition()
        self._so_far: dict[str, tuple[Completion, Sampling, Future[Completion]]] = {}
        self._left: dict[str, int] = {}
        self._submitted = 0.0
        self._closed = False
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, request: Request, sampling: Sampling) -> Future[Completion]:
        assert self.version is not None
        partial = request.partial or Completion(request.id, (), (), (), "abort")
        assert partial.finish == "abort"
        future: Future[Completion] = Future()
        with self._changed:
            if not self._so_far:
                self.begun.append([])
            assert request.id not in self._so_far
            self.begun[-1].append(request.id)
            self._so_far[request.id] = partial, sampling, future
            self._left[request.id] = FEW
            self._left |= dict.fromkeys(list(self._so_far)[: self._quick], sampling.max_new_tokens)
            self._submitted = time.monotonic()
            self._changed.notify_all()
        return future

    def serve(self, goal: Future | None) -> None:
        assert goal is not None
        wait([goal])

    def _work(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._so_far or self._closed)
            time.sleep(1e-4)
            with self._changed:  # what is submitted together begins together
                done = self._round() if time.monotonic() > self._submitted + 5e-3 else []
            for future, outcome in done:
                future.set_exception(outcome) if isinstance(outcome, Exception) else future.set_result(outcome)

    def _round(self) -> list[tuple[Future[Completion], Completion | Exception]]:
        done: list[tuple[Future[Completion], Completion | Exception]] = []
        for id, (so_far, sampling, future) in list(self._so_far.items()):
            if not self._left[id]:
                continue
            self._left[id] -= 1
            at = len(so_far.tokens)
            grown = so_far.followed_by(Completion(id, (at,), (-1.0,), (self.version,), "abort"))
            self._so_far[id] = grown, sampling, future
            if at + 1 == length(id, sampling.max_new_tokens):
                del self._so_far[id]
                done.append((future, replace(grown, finish="stop")))
        if self.fails and self._so_far:
            self.fails -= 1
            done += [(future, CompletionLost(id)) for id, (_, _, future) in self._so_far.items()]
            self._so_far.clear()
        return done

    def update_weights(self, buckets: Any, version: int) -> None:
        assert not self._so_far, "an update in the middle of a completion"
        self.version = version

    def weight_version(self) -> int | None:
        return self.version

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None:
        with self._changed:
            so_far, self._so_far = self._so_far, {}
        for completion, _, future in so_far.values():
            future.set_result(completion)

    def check_health(self) -> None:
        assert not self._so_far
        self.healed += 1

    def take_counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Rewards:
    """The reward of a completion is its length; calls: how many completions each had."""

    def __init__(self, whole_batch: bool = False):
        self.whole_batch, self.calls = whole_batch, list[int]()

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Scored]:
        self.calls.append(len(completions))
        assert all(completion.finish == "stop" for completion in completions)
        return [Scored(float(len(c.tokens)), {}, None, "") for c in completions]
