"""What the fleet needs of a server is `Server` and `WeightSync`: a kind that is not SGLang's, nor even HTTP."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from support.servers.servers import requests

from isoloss.engine.rl.backends.servers.backend import ServerBackend
from isoloss.engine.rl.backends.servers.server import Server, ServerLost, WeightSync
from isoloss.engine.rl.config import RolloutConfig
from isoloss.engine.rl.trajectory import Completion, Sampling

URLS = ("http://a:1", "http://b:2")
PROMPT = 6


@dataclass
class State:
    """What is in a server of this kind: its one weight w, from which token t has the log-probability -w t."""

    weight: float = 0.0
    version: int | None = None
    paused: bool = False
    lost: bool = False
    made: list[str] = field(default_factory=list)


class Memory(Server):
    """Seven tokens a call at most, counting on from the length of the context."""

    states: dict[str, State]

    def generate(self, request, tokens, sampling, budget):
        self.check_health()
        self.state.made.append(request.id)
        time.sleep(0.01)  # so that requests meet
        count = min(7, budget)
        made = tuple(range(len(tokens), len(tokens) + count))
        logprobs = tuple(-self.state.weight * token for token in made)
        finish = "length" if count == budget else "stop"
        return Completion(request.id, made, logprobs, (self.state.version,) * count, finish)

    @property
    def state(self) -> State:
        return self.states[self.url]

    def pause(self):
        self.state.paused = True

    def resume(self):
        self.state.paused = False

    def abort(self): ...

    def check_alive(self):
        if self.state.lost:
            raise ServerLost(f"{self.url} is gone")

    def check_health(self):
        self.check_alive()
        assert not self.state.paused

    def weight_version(self):
        self.check_alive()
        return self.state.version

    def set_weight_version(self, version):
        self.state.version = version

    def flush_cache(self): ...

    def begin_update(self):
        self.state.version = None

    def end_update(self): ...


class Copying(WeightSync):
    receives = "rank 0"

    def prepare(self, bucket):
        return bucket

    def send(self, servers, payload):
        for server in servers:
            server.state.weight = payload[0][1].item()


@pytest.fixture
def states() -> dict[str, State]:
    return {url: State() for url in URLS}


@pytest.fixture
def backend(one_rank, states, tmp_path) -> Iterator[ServerBackend]:
    kind = type("Kind", (Memory,), {"states": states})
    config = RolloutConfig(backend="sglang", servers=URLS, timeout=5.0, concurrency=4)
    made = ServerBackend(config, tmp_path, 100, tmp_path / "logs", kind, lambda *_: Copying())
    yield made
    made.close()


def check(backend: ServerBackend, weight: float, version: int, number: int = 8) -> None:
    """Every completion is whole, in pieces of seven tokens, of these weights."""
    completions = backend.generate(requests(number, PROMPT), Sampling(16, stop_token_ids=(0,)))
    for request, completion in zip(requests(number, PROMPT), completions):
        assert completion.id == request.id and completion.finish == "length"
        assert completion.tokens == tuple(range(PROMPT, PROMPT + 16)) and set(completion.versions) == {version}
        assert completion.logprobs == tuple(-weight * token for token in completion.tokens)


def update(backend: ServerBackend, weight: float, version: int) -> None:
    backend.update_weights(iter([[("w", torch.tensor(weight))]]), version)


def test_weights_and_completions(backend, states):
    for version, weight in ((1, 2.0), (2, 0.5)):
        update(backend, weight, version)
        assert backend.weight_version() == version and not any(state.paused for state in states.values())
        check(backend, weight, version)
    assert all(state.made for state in states.values())


def test_a_lost_server_passes_its_requests_on(backend, states):
    update(backend, 2.0, 1)
    states[URLS[0]].lost = True
    check(backend, 2.0, 1)
    assert backend.weight_version() is None and not states[URLS[0]].made


def test_a_server_with_other_weights_takes_no_part(backend, states):
    update(backend, 2.0, 1)
    states[URLS[1]].version = 7
    check(backend, 2.0, 1)
    assert not states[URLS[1]].made
