"""Servers to test against: the in-repo double in every run, and a real SGLang server with `-m sglang`.

Both are started once a session, by the code under test, and killed at its end.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.models import families
from support.runs.ports import free_port
from support.servers.server_commands import DOUBLE, SGLANG
from support.servers.servers import MODEL, VOCAB

from isoloss.engine.rl.backends.servers.backend import ServerBackend
from isoloss.engine.rl.backends.servers.process import ServerProcess
from isoloss.engine.rl.backends.servers.server import ServerLost
from isoloss.engine.rl.backends.sglang import weights
from isoloss.engine.rl.backends.sglang.server import SGLangServer
from isoloss.engine.rl.config import RolloutConfig

START_SECONDS = 300.0


@dataclass(frozen=True)
class Service:
    """A running server. command: what starts another like it (rollout.server_command). model: the folder that it was
    started with, of a float32 Qwen3 with random weights, without a tokenizer."""

    url: str
    command: str
    model: Path
    real: bool


class Control:
    """The double's own endpoints."""

    def __init__(self, url: str):
        self.server = SGLangServer(url, 60.0)

    def inject(self, kind: str, path: str = "/generate", count: int = 1) -> None:
        self.server.post("/faults", {"faults": [{"kind": kind, "path": path, "count": count}]})

    def heal(self) -> None:
        self.server.post("/faults", {"faults": []})

    def options(self, **options: bool | str) -> None:
        self.server.post("/options", options)

    def calls(self, path: str) -> int:
        return self.server.get("/calls").get(path, 0)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return families.write_folder("qwen3", tmp_path_factory.mktemp("sglang") / "model", seed=0, **MODEL)


@pytest.fixture(scope="session")
def start(tmp_path_factory, model_folder) -> Iterator[Callable[..., str]]:
    """start(command, url=an unused one) -> the URL of a new server, which answers."""
    processes: list[ServerProcess] = []

    def start(command: str, url: str | None = None) -> str:
        url = url or free_url()
        processes.append(ServerProcess(command, url, model_folder, tmp_path_factory.mktemp("logs")))
        processes[-1].start()
        processes[-1].wait_ready(lambda: answers(url), START_SECONDS)
        return url

    yield start
    for process in processes:
        process.stop()


@pytest.fixture(scope="session")
def double(start, model_folder) -> Service:
    return Service(start(DOUBLE), DOUBLE, model_folder, real=False)


@pytest.fixture(scope="session")
def second_double(start, double) -> Service:
    return Service(start(DOUBLE), DOUBLE, double.model, real=False)


@pytest.fixture(scope="session")
def sglang(start, model_folder) -> Service:
    """A real SGLang server, in the environment that `make test-sglang` makes."""
    return Service(start(SGLANG), SGLANG, model_folder, real=True)


@pytest.fixture(scope="session", params=["double", pytest.param("sglang", marks=pytest.mark.sglang)])
def service(request) -> Service:
    """Each of the two kinds of server in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def backend(one_rank, request, model_folder, tmp_path) -> Iterator[Callable[..., ServerBackend]]:
    """backend(weight_sync, model, **more of RolloutConfig) -> a backend, closed after the test; on the test's service
    where `servers` does not say otherwise."""
    made: list[ServerBackend] = []

    def make(weight_sync: str = "tensor", model: Path = model_folder, **changes) -> ServerBackend:
        config = {"timeout": START_SECONDS, "sync_dir": str(tmp_path / "sync")} | changes
        if "servers" not in config:
            config["servers"] = (request.getfixturevalue("service").url,)
        config = RolloutConfig(backend="sglang", weight_sync=weight_sync, **config)
        logs = tmp_path / "logs"
        made.append(ServerBackend(config, model, VOCAB, logs, SGLangServer, weights.weight_sync))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def first(double) -> Iterator[Control]:
    control = Control(double.url)
    yield control
    control.heal()
    control.server.close()


@pytest.fixture
def second(second_double) -> Iterator[Control]:
    control = Control(second_double.url)
    yield control
    control.heal()
    control.options(memory_saver=False, keeps_weights=False, without_sessions=False, loses="", device="cpu")
    control.server.close()


@pytest.fixture
def both(first, second) -> tuple[str, str]:
    return (first.server.url, second.server.url)


@pytest.fixture
def unused_url() -> str:
    """Where a server could be started."""
    return free_url()


def free_url() -> str:
    return f"http://127.0.0.1:{free_port()}"


def answers(url: str) -> bool:
    server = SGLangServer(url, 5.0)
    try:
        server.check_health()
    except ServerLost:
        return False
    finally:
        server.close()
    return True
