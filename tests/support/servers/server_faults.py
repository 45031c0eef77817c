"""A campaign of faults against servers: batches and updates of weights, as a run's loop asks for them, with faults in
their way. Called by tests, and by whoever wants more faults or other seeds."""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from doubles.sglang_server import LIES

from isoloss.engine.config.schema import ModelConfig
from isoloss.engine.rl.backends.protocol import Bucket
from isoloss.engine.rl.backends.servers.backend import ServerBackend
from isoloss.engine.rl.backends.servers.server import ServerLost
from isoloss.engine.rl.backends.sglang.server import SGLangServer
from isoloss.engine.rl.backends.sglang.weights import weight_sync
from isoloss.engine.rl.config import RLConfig, RolloutConfig
from isoloss.engine.rl.prompts import PromptSet
from isoloss.engine.rl.reward.rewarder import Scored
from isoloss.engine.rl.rollout import Rollout
from isoloss.engine.rl.trajectory import Completion, Prompt
from isoloss.engine.step.engine import Engine
from support.servers.servers import VOCAB, buckets, policy, requests, worst

# What each costs: one more request, or nothing.
ANSWERS = ("500", "reset", "truncate", "break off", "not JSON", "a list", *LIES)
HARMLESS = ("late",)
# These take a server away, and what is under way on it: they are injected one at a time, and two requests, which is as
# many as the servers, are under way on one each.
DEADLY = ("die", "hang")
UPDATES = ("400", "500", "reset", "truncate", "not JSON", "die", "hang")
UPDATE_PATHS = ("/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update", "/update_weight_version")
PARITY = 1e-5
PROMPTS, TOKENS = 12, 6


@dataclass
class Found:
    """faults: injected, by kind. wrong: samples that are damaged or stale, one line each. slowest: seconds of the
    longest call. counted, expected: what the backend counted, and what was injected."""

    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    samples: int = 0
    counted: Counter[str] = field(default_factory=Counter)
    expected: Counter[str] = field(default_factory=Counter)


class Weights:
    """The part of an Engine that a rollout needs: new weights at every step."""

    def __init__(self) -> None:
        self.model = policy(0)

    def weight_stream(self, bucket_bytes: int, receives: str) -> Iterator[Bucket]:
        return buckets(self.model)


class Unrewarded:
    """Gives every completion nothing."""

    whole_batch = False

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Scored]:
        return [Scored(0.0, {}, None, "") for _ in completions]


def campaign(
    seed: int, faults: int, urls: Sequence[str], model_folder: Path, logs: Path, timeout: float = 6.0
) -> Found:
    """So many faults, drawn by the seed, against two servers that return by themselves when they die.

    timeout: rollout.timeout, which a hanging server takes.
    The caller has a process group. Raises what a run would end with: no fault of these should.
    """
    chance, found, weights = random.Random(seed), Found(), Weights()
    controls = [SGLangServer(url, 60.0) for url in urls]
    config = RLConfig(
        model=ModelConfig(path=str(model_folder)),
        rollout=RolloutConfig(
            backend="sglang",
            servers=tuple(urls),
            weight_sync="tensor",
            timeout=timeout,
            concurrency=len(urls),
            max_new_tokens=TOKENS,
            eval_temperature=1.0,
        ),
    )
    backend = ServerBackend(config.rollout, model_folder, VOCAB, logs, SGLangServer, weight_sync)
    rollout = Rollout(cast(Engine, weights), backend, Unrewarded(), config, PromptSet(()), ())
    try:
        _step(rollout, weights, found, version=0)
        for version, kinds in enumerate(_steps(chance, faults), 1):
            at_update = [kind for where, kind in kinds if where == "update"]
            weights.model = policy(version)
            for kind in at_update:
                _inject(chance.choice(controls), kind, chance.choice(UPDATE_PATHS))
            _call(found, lambda version=version: rollout.sync_weights(version))
            found.counted.update(backend.take_counts())
            found.expected["syncs_retried"] += len(at_update)
            at_generate = [kind for where, kind in kinds if where == "generate"]
            for kind in at_generate:
                _inject(chance.choice(controls), kind, "/generate")
            _batch(rollout, weights, found, version)
            while at_generate and any(map(_waiting, controls)):  # a server that got fewer requests than faults
                _batch(rollout, weights, found, version)
            found.faults.update(at_update + at_generate)
            lost = sum(kind in DEADLY for kind in at_generate)
            found.expected["requests_retried"] += sum(kind not in HARMLESS for kind in at_generate)
            found.expected["servers_lost"] += lost + at_update.count("die")
            found.expected["servers_returned"] += lost + at_update.count("die")
            found.counted.update(backend.take_counts())
        _step(rollout, weights, found, version=10**6)  # the last that was lost is back
        found.counted.update(backend.take_counts())
    finally:
        for control in controls:
            control.close()
        backend.close()
        rollout.close()
    return found


def _steps(chance: random.Random, faults: int) -> Iterator[list[tuple[str, str]]]:
    """The faults of each step: (at what, kind). Each that takes a server away has a call of its own."""
    left = faults
    while left > 0:
        number = min(left, chance.randrange(1, 6))
        deadly = chance.random() < 0.12
        if deadly:
            kinds = [(chance.choice(("update", "generate")), chance.choice(DEADLY))]
        elif chance.random() < 0.2:
            kinds = [("update", chance.choice([kind for kind in UPDATES if kind not in DEADLY]))]
        else:
            kinds = [("generate", chance.choice((*ANSWERS, *HARMLESS))) for _ in range(number)]
        left -= len(kinds)
        yield kinds


def _inject(server: SGLangServer, kind: str, path: str) -> None:
    """Beside the faults that wait there."""
    server.post("/faults", {"faults": [*_waiting(server), {"kind": kind, "path": path, "count": 1}]})


def _waiting(server: SGLangServer) -> list[dict[str, Any]]:
    """Its faults that no request has met yet."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return server.get("/faults")["faults"]
        except ServerLost:  # it died, and is on its way back
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _call(found: Found, call: Any) -> Any:
    began = time.monotonic()
    result = call()
    found.slowest = max(found.slowest, time.monotonic() - began)
    return result


def _step(rollout: Rollout, weights: Weights, found: Found, version: int) -> None:
    _call(found, lambda: rollout.sync_weights(version))
    _batch(rollout, weights, found, version)


def _batch(rollout: Rollout, weights: Weights, found: Found, version: int) -> None:
    """A batch, every completion of which must be whole, and of these weights."""
    asked = requests(PROMPTS)
    prompts = [Prompt(request.id, request.prompt_tokens, "?") for request in asked]
    trajectories = _call(found, lambda: rollout.evaluate(prompts))
    found.samples += len(trajectories)
    for request, completion in zip(asked, [each.completion for each in trajectories], strict=True):
        gap = worst(weights.model, request, completion) if len(completion.tokens) else 0.0
        whole = (
            completion.id == f"{request.id}/eval/0"
            and len(completion.tokens) == TOKENS
            and completion.finish == "length"
        )
        if not whole or set(completion.versions) != {version} or not gap <= PARITY:
            found.wrong.append(f"version {version}: {completion} is {gap:g} from the model")
