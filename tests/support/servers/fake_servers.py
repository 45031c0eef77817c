"""A `BesideTraining` backend without servers, models or tokens that mean anything: a thread makes them."""

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from isoloss.engine.rl.backends.protocol import Arrived, ignore
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


class FakeServers:
    """Each round every request gets a token of the present version; all but the first `quick` of a call get FEW of them
    and then wait for the next call. begun: the ids of every call. fails: calls of `begin` from now on that end with
    nothing for what is not complete, after a round, as if servers were lost."""

    receives: Receives = "every rank"

    def __init__(self, quick: int):
        self.version: int | None = None
        self.begun: list[list[str]] = []
        self.healed = 0
        self.fails = 0
        self._quick = quick
        self._aborted = threading.Event()
        self._busy = False

    def begin(
        self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived
    ) -> Future[Sequence[Completion | None]]:
        assert not self._busy and self.version is not None
        self._aborted.clear()
        self._busy = True
        self.begun.append([request.id for request in requests])
        lost = self.fails > 0
        self.fails -= lost
        result: Future[Sequence[Completion | None]] = Future()

        def work() -> None:
            done = self._generate(requests, sampling, arrived, lost)
            self._busy = False
            result.set_result(done)

        threading.Thread(target=work, daemon=True).start()
        return result

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived = ignore
    ) -> Sequence[Completion | None]:
        assert not self._busy
        self._aborted.clear()
        return self._generate(requests, sampling, arrived, False)

    def _generate(self, requests, sampling, arrived, lost) -> list[Completion | None]:
        under_way = {r.id: r.partial or Completion(r.id, (), (), (), "abort") for r in requests}
        assert all(partial.finish == "abort" for partial in under_way.values())
        done: dict[str, Completion | None] = {}
        quick = set([request.id for request in requests][: self._quick])
        left = {request.id: FEW for request in requests}
        while under_way and not self._aborted.is_set():
            for id, so_far in list(under_way.items()):
                if id not in quick and not left[id]:
                    continue
                left[id] -= 1
                at = len(so_far.tokens)
                grown = so_far.followed_by(Completion(id, (at,), (-1.0,), (self.version,), "abort"))
                under_way[id] = grown
                if at + 1 == length(id, sampling.max_new_tokens):
                    done[id] = replace(grown, finish="stop")
                    del under_way[id]
                    arrived(done[id])
            time.sleep(1e-4)
            if lost:
                return [done.get(request.id) for request in requests]
        return [done.get(request.id) or under_way[request.id] for request in requests]

    def update_weights(self, buckets: Any, version: int) -> None:
        assert not self._busy, "an update in the middle of a completion"
        self.version = version

    def weight_version(self) -> int | None:
        return self.version

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None:
        self._aborted.set()

    def check_health(self) -> None:
        assert not self._busy
        self.healed += 1

    def take_counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


class Rewards:
    """The reward of a completion is its length; calls: how many completions each had."""

    def __init__(self, whole_batch: bool = False):
        self.whole_batch, self.calls = whole_batch, list[int]()

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Scored]:
        self.calls.append(len(completions))
        assert all(completion.finish == "stop" for completion in completions)
        return [Scored(float(len(c.tokens)), {}, None, "") for c in completions]
