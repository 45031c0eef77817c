"""An engine with an adapter, and a fleet that serves it; runs on every rank of a layout."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isoloss.engine.rl.backends.protocol import Bucket
from isoloss.engine.rl.backends.servers.backend import ServerBackend
from isoloss.engine.rl.backends.sglang.adapter_server import AdapterServer
from isoloss.engine.rl.backends.sglang.adapters import adapter_fleet
from isoloss.engine.rl.config import RolloutConfig
from isoloss.engine.rl.trajectory import Completion, Sampling
from isoloss.engine.step.engine import Engine
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.initial import InitialFactors
from support.models.lora import make_engine
from support.ranks.rank0 import of_rank_0
from support.runs.rollouts import worst_difference
from support.servers.servers import MODEL, requests

# SGLang pads widths of MLPs to multiples of 32 on a CPU, and an adapter would not fit.
SIZES = {**MODEL, "intermediate_size": 96}
LORA = LoraConfig(rank=4, alpha=9.0, seed=1)
OPTIONS = "--enable-lora --max-lora-rank 4 --max-loras-per-batch 3 --lora-strict-loading --lora-target-modules"


def fleet(engine: Engine, folder: Path, logs: Path, **config: Any) -> ServerBackend:
    rollout = RolloutConfig(**{"backend": "sglang", "weight_sync": "tensor", "timeout": 60.0, **config})
    kind = adapter_fleet(engine.arch, engine.config.lora)
    return ServerBackend(rollout, folder, engine.arch.vocab_size, logs, *kind)


def refill(engine: Engine, seed: int) -> None:
    """Other factors, none of them 0, which add so little that rounding stays what it is without them."""
    assert engine.trained.adapter is not None
    engine.trained.adapter.load(InitialFactors(seed, random_b=True))
    for owned in engine.trained.adapter.owned():
        if owned.weight.name.endswith(".lora_B"):
            owned.parameter.data.mul_(0.2)


def update(
    backend: ServerBackend, engine: Engine, version: int, change: Callable[[Bucket], Bucket] = lambda bucket: bucket
) -> None:
    """Factors that go by the version, in several buckets."""
    refill(engine, version)
    backend.update_weights(map(change, engine.adapter_stream(5000, backend.receives)), version)


def worst(engine: Engine, version: int, completions: Sequence[Completion | None]) -> float:
    """Difference of log-probabilities from the engine's with the factors of this version, which all tokens say."""
    whole = present(completions)
    assert all(set(completion.versions) == {version} for completion in whole)
    refill(engine, version)
    return worst_difference(engine, requests(len(whole), length=12), whole)


def apart(engine: Engine, completions: Sequence[Completion | None]) -> float:
    """The same difference from the model without an adapter."""
    assert engine.trained.adapter is not None
    with engine.trained.adapter.off():
        return worst_difference(engine, requests(len(completions), length=12), present(completions))


def present(completions: Sequence[Completion | None]) -> list[Completion]:
    """All of them, none of which may be lost."""
    found = [completion for completion in completions if completion is not None]
    assert len(found) == len(completions)
    return found


def server_of(backend: ServerBackend, index: int = 0) -> AdapterServer:
    server = backend._servers[index]
    assert isinstance(server, AdapterServer)
    return server


def on_a_layout(urls: tuple[str, ...], folder: Path, logs: Path, way: str, lora: LoraConfig, parallel: dict) -> dict:
    """Two updates: what this rank sees of them, and how far the servers' log-probabilities are from this layout's."""
    engine = make_engine(folder, lora, precision="fp32", **parallel)
    backend = fleet(engine, folder, logs, servers=urls, weight_sync=way, sync_dir=str(logs / "sync"))
    seen: dict[str, list] = {"versions": [], "worst": [], "apart": [], "names": []}
    try:
        for version in (1, 2):
            update(backend, engine, version)
            seen["versions"].append(backend.weight_version())
            completions = of_rank_0(backend.generate(requests(4, length=12), Sampling(8)))
            seen["worst"].append(worst(engine, version, completions))
            seen["apart"].append(apart(engine, completions))
            names = backend.rank0.run(lambda: [server_of(backend, k).loaded() for k in range(len(urls))])
            seen["names"].append(names)
    finally:
        backend.close()
    return seen
