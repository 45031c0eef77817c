"""Rollouts with adapters: the double in every run, and with `-m sglang` SGLang itself.

What the double does with adapters was seen of SGLang by the tests that run against both.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from support.models import families
from support.models.lora import make_engine
from support.runs.waiting import LONG, until
from support.servers.adapters import LORA, OPTIONS, SIZES, apart, fleet, server_of, update, worst
from support.servers.server_commands import DOUBLE, SGLANG
from support.servers.servers import requests

from isoloss.engine.rl.backends.servers.backend import ServerBackend
from isoloss.engine.rl.backends.servers.server import Refused
from isoloss.engine.rl.backends.sglang import adapters
from isoloss.engine.rl.backends.sglang.adapter_server import AdapterServer
from isoloss.engine.rl.trajectory import Sampling
from isoloss.engine.step.engine import Engine
from isoloss.models.lora.served import refusals
from isoloss.parallel import UserError

from .conftest import Control, Service

PARITY = 5e-6
TARGETS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
COMMANDS = {"double": DOUBLE, "sglang": f"{SGLANG} --lora-backend torch_native"}
KINDS = ["double", pytest.param("sglang", marks=pytest.mark.sglang)]
LOAD = "/load_lora_adapter_from_tensors"


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return families.write_folder("qwen3", tmp_path_factory.mktemp("adapters") / "model", seed=0, **SIZES)


@pytest.fixture(scope="session")
def started(start, folder) -> Callable[..., Service]:
    """started(kind, *options) -> a new server with adapters."""

    def started(kind: str, *options: str) -> Service:
        command = COMMANDS[kind].replace("{model}", str(folder))
        url = start(" ".join([command, *options, OPTIONS, TARGETS]))
        return Service(url, COMMANDS[kind], folder, real=kind == "sglang")

    return started


@pytest.fixture(scope="session")
def double_with_adapters(started) -> Service:
    return started("double")


@pytest.fixture(scope="session")
def second_with_adapters(started) -> Service:
    return started("double")


@pytest.fixture(scope="session")
def sglang_with_adapters(started) -> Service:
    return started("sglang")


@pytest.fixture(scope="session", params=KINDS)
def service(request) -> Service:
    return request.getfixturevalue(f"{request.param}_with_adapters")


@pytest.fixture
def engine(one_rank, folder) -> Engine:
    return make_engine(folder, LORA, precision="fp32")


@pytest.fixture
def rollout(engine, request, folder, tmp_path) -> Iterator[Callable[..., ServerBackend]]:
    """rollout(**of RolloutConfig) -> a backend, closed after the test; on the test's service where `servers` does not
    say otherwise."""
    made: list[ServerBackend] = []

    def make(**config) -> ServerBackend:
        if "servers" not in config:
            config["servers"] = (request.getfixturevalue("service").url,)
        made.append(fleet(engine, folder, tmp_path / "logs", sync_dir=str(tmp_path / "sync"), **config))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def control(double_with_adapters) -> Iterator[Control]:
    control = Control(double_with_adapters.url)
    yield control
    control.heal()
    control.options(
        enable_lora=True, max_lora_rank=4, max_loras_per_batch=3, max_loaded_loras=None, dp_size=1,
        lora_target_modules=TARGETS.split(), answers_by_the_model=False,
    )  # fmt: skip
    control.server.post("/update_weight_version", {"new_version": "default"})
    control.server.close()


ASKED = requests(6, length=12)


# ------------------------------------------------------------------------------------------------------------- updates


@pytest.mark.parametrize("way", ["memory", "request", "folder"])
def test_an_update_is_what_requests_then_get(service, rollout, engine, monkeypatch, tmp_path, way):
    """And nothing of the model itself is sent, or flushed; only the adapter in use stays there."""
    if way == "request":  # as to a server on another machine
        monkeypatch.setattr(adapters, "is_here", lambda url: False)
    backend = rollout(weight_sync="disk" if way == "folder" else "broadcast")
    assert backend.weight_version() is None and backend.generate(ASKED[:1], Sampling(4)) == [None]
    server = server_of(backend)
    base = server.checksums()
    for version in (1, 2, 7):
        update(backend, engine, version)
        assert backend.weight_version() == version
        (name,) = server.loaded()
        assert name.startswith(f"policy-{version}-")
        for temperature in (0.0, 1.0):
            found = backend.generate(ASKED, Sampling(16, temperature))
            if temperature:
                assert worst(engine, version, found) <= PARITY and apart(engine, found) > 0.1
    assert server.checksums() == base
    folders = list((tmp_path / "sync").glob("*"))
    assert [each.name for each in folders] == ([name] if way == "folder" else [])


def test_seconds_of_an_update(service, rollout, engine, capsys):
    backend = rollout()
    server, seconds = server_of(backend), []
    post, loading = server.post, []

    def timed(path, body, answer=True):
        began = time.perf_counter()
        reply = post(path, body, answer)
        loading.extend([time.perf_counter() - began] if path == LOAD else [])
        return reply

    server.post = timed
    for version in range(1, 6):
        began = time.perf_counter()
        update(backend, engine, version)
        seconds.append(time.perf_counter() - began)
    with capsys.disabled():
        print(f"\n[an update: {min(seconds):.3f} s, of these {min(loading):.3f} s for SGLang to load the adapter]")
    assert len(loading) == 5


def test_requests_under_way_end_with_the_adapter_that_they_began_with(rollout, engine, service):
    """They are not stopped; the new ones beside them have the new adapter; the old one goes when none has it."""
    backend = rollout()
    update(backend, engine, 1)
    server, long = server_of(backend), 500 if service.real else 150
    under_way = [backend.submit(request, Sampling(long)) for request in ASKED]
    running = lambda: server.get("/v1/loads?include=core")["loads"][0]["num_running_reqs"] >= len(ASKED)
    until(running, "the requests were running", lambda: not any(future.done() for future in under_way))
    update(backend, engine, 2)
    assert not any(future.done() for future in under_way)
    assert {name.rsplit("-", 1)[0] for name in server.loaded()} == {"policy-1", "policy-2"}
    new = [backend.submit(request, Sampling(4)) for request in ASKED]
    assert worst(engine, 2, [future.result(LONG) for future in new]) <= PARITY
    assert worst(engine, 1, [future.result(LONG) for future in under_way]) <= PARITY
    update(backend, engine, 3)
    assert [name.rsplit("-", 1)[0] for name in server.loaded()] == ["policy-3"]


def test_a_partial_completion_goes_on_with_the_new_adapter(rollout, engine, service):
    backend, long = rollout(), 500 if service.real else 150
    update(backend, engine, 1)
    futures = [backend.submit(request, Sampling(long)) for request in ASKED[:2]]
    server = server_of(backend)
    running = lambda: server.get("/v1/loads?include=core")["loads"][0]["num_running_reqs"] >= 2
    until(running, "the requests were running", lambda: not any(future.done() for future in futures))
    backend.abort()
    parts = [future.result(LONG) for future in futures]
    update(backend, engine, 2)
    asked = [replace(request, partial=part) for request, part in zip(ASKED, parts)]
    for part, whole in zip(parts, backend.generate(asked, Sampling(long))):
        count = len(part.tokens)
        assert whole is not None and whole.tokens[:count] == part.tokens and len(whole.tokens) == long
        assert whole.versions == (1,) * count + (2,) * (long - count) and 0 < count < long


def test_what_the_server_does_with_names(service, rollout, engine):
    """A name that it has, and names that it does not have, are refused; a request without a name gets the model."""
    backend = rollout()
    update(backend, engine, 1)
    server = server_of(backend)
    (name,) = server.loaded()
    flat = adapters.flatten([("base_model.model.x.lora_A.weight", torch.zeros(4, 4))])
    again = {
        "config_dict": backend._sync._config,
        "serialized_named_tensors": [adapters.serialize(flat)],
        "load_format": "flattened_bucket",
    }
    with pytest.raises(Refused, match=f"{name}.*already loaded"):
        server.load(name, LOAD, again)
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}}
    with pytest.raises(Refused, match="never been loaded"):
        server.post("/generate", {**body, "lora_path": "policy-9"})
    server.unload(name)
    with pytest.raises(Refused, match=name):  # it came in a request: there is nothing to load it from
        server.post("/generate", {**body, "lora_path": name})
    with pytest.raises(Refused, match=f"{name}.*does not exist"):
        server.unload(name)
    assert server.post("/generate", body)["output_ids"]


# -------------------------------------------------------------------------------------------------------------- faults


def test_tensors_that_are_not_the_models_are_not_sent(service, rollout, engine):
    """A server would take them, and die when the next request comes."""
    backend = rollout()
    update(backend, engine, 1)
    name = "base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"
    for change, told in (
        (lambda bucket: [(n, t[:-1] if f"base_model.model.{n}" == name else t) for n, t in bucket], r"\(47, 4\)"),
        (lambda bucket: [(n, t) for n, t in bucket if f"base_model.model.{n}" != name], "None"),
    ):
        with pytest.raises(UserError, match=f"1 of 28 tensors.*{name}: {told}.*nothing was sent"):
            update(backend, engine, 2, change)
        assert backend.weight_version() == 1
        assert worst(engine, 1, backend.generate(ASKED, Sampling(4))) <= PARITY
    update(backend, engine, 2)
    assert worst(engine, 2, backend.generate(ASKED, Sampling(4))) <= PARITY


def test_a_failed_update_leaves_the_adapter_before(rollout, engine, control, both_urls):
    """On all servers, though one of them has the new one already; the next update takes that away."""
    backend = rollout(servers=both_urls)
    update(backend, engine, 1)
    control.inject("500", LOAD)
    with pytest.raises(UserError, match=f"{LOAD}: status 500.*injected"):
        update(backend, engine, 2)
    names = [server_of(backend, k).loaded() for k in range(2)]
    assert [len(each) for each in names] == [1, 2] and backend.take_counts()["syncs_retried"] == 1
    assert backend.weight_version() == 1
    assert worst(engine, 1, backend.generate(ASKED, Sampling(8))) <= PARITY
    update(backend, engine, 2)
    assert worst(engine, 2, backend.generate(ASKED, Sampling(8))) <= PARITY
    names = [server_of(backend, k).loaded() for k in range(2)]
    assert names[0] == names[1] and len(names[0]) == 1


@pytest.mark.parametrize("told", ["a list", "not JSON", "truncate", "reset", "400"])
def test_answers_to_a_load_that_say_nothing(rollout, engine, control, told):
    backend = rollout(servers=(control.server.url,))
    update(backend, engine, 1)
    control.inject(told, LOAD)
    with pytest.raises(UserError, match=LOAD) as raised:
        update(backend, engine, 2)
    assert "\n" not in str(raised.value)
    assert worst(engine, 1, backend.generate(ASKED, Sampling(4))) <= PARITY


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_killed_during_an_update(rollout, engine, request, unused_url, kind, monkeypatch):
    """It comes back without an adapter, and serves none by the name of one."""
    service = request.getfixturevalue(f"{kind}_with_adapters")
    mine = psutil.Process()
    before = set(mine.children(recursive=True))
    backend = rollout(servers=(unused_url,), server_command=service.command, timeout=200.0)
    processes = set(mine.children(recursive=True)) - before
    update(backend, engine, 1)
    load = AdapterServer.load

    def killed(server: AdapterServer, *arguments) -> None:
        load(server, *arguments)
        for process in processes:
            process.kill()

    with monkeypatch.context() as patch:
        patch.setattr(AdapterServer, "load", killed)
        with pytest.raises(UserError, match=f"{unused_url}"):
            update(backend, engine, 2)
    assert backend.weight_version() is None
    backend.check_health()
    assert backend.weight_version() is None and server_of(backend).loaded() == []
    assert backend.generate(ASKED[:1], Sampling(4)) == [None]
    update(backend, engine, 2)
    assert backend.weight_version() == 2
    assert worst(engine, 2, backend.generate(ASKED, Sampling(8))) <= PARITY


@pytest.mark.parametrize("kind", ["double"])
def test_an_adapter_that_changes_on_its_way_is_not_served(rollout, engine, request, unused_url, kind, monkeypatch):
    """SGLang's scheduler ends at a wrong checksum; the server that is started again gets the adapter as it is."""
    service = request.getfixturevalue(f"{kind}_with_adapters")
    backend = rollout(servers=(unused_url,), server_command=service.command, timeout=200.0)
    update(backend, engine, 1)
    serialize = adapters.serialize

    def changed(flat, **options) -> str:
        flat.flat_bytes[-1] ^= 1
        return serialize(flat, **options)

    with monkeypatch.context() as patch:
        patch.setattr(adapters, "serialize", changed)
        with pytest.raises(UserError, match=f"{unused_url}{LOAD}"):
            update(backend, engine, 2)
    backend.check_health()
    update(backend, engine, 2)
    assert backend.weight_version() == 2
    assert worst(engine, 2, backend.generate(ASKED, Sampling(8))) <= PARITY


def test_a_server_that_lost_its_adapter_gets_the_present_one_first(rollout, engine, control, both_urls):
    """Its requests go to the other one meanwhile."""
    backend = rollout(servers=both_urls)
    update(backend, engine, 1)
    lost = server_of(backend)
    lost.unload(lost.loaded()[0])  # all that a restart leaves
    assert backend.weight_version() is None
    calls = control.calls("/generate")
    assert worst(engine, 1, backend.generate(ASKED, Sampling(8))) <= PARITY
    assert control.calls("/generate") == calls
    update(backend, engine, 1)  # what `Rollout.sync_weights` then does
    counts = backend.take_counts()
    assert backend.weight_version() == 1 and counts["servers_lost"] == counts["servers_returned"] == 1
    assert worst(engine, 1, backend.generate(ASKED, Sampling(8))) <= PARITY
    assert control.calls("/generate") > calls


def test_an_adapter_that_is_lost_under_its_requests(rollout, engine, control):
    """The server refuses requests for it. They are lost, and not the user's to mend."""
    backend = rollout(servers=(control.server.url,), concurrency=1)
    update(backend, engine, 1)
    first = backend.submit(ASKED[0], Sampling(100))
    later = [backend.submit(request, Sampling(4)) for request in ASKED[1:]]
    server = server_of(backend)
    until(lambda: server.get("/v1/loads")["loads"][0]["num_running_reqs"] > 0, "a request ran")
    threading.Thread(target=server.unload, args=(server.loaded()[0],)).start()
    assert first.result(LONG).versions == (1,) * 100
    assert {type(future.exception(LONG)).__name__ for future in later} == {"CompletionLost"}


def test_weights_that_another_run_sends_are_noticed(rollout, engine, control):
    backend = rollout(servers=(control.server.url,))
    update(backend, engine, 1)
    control.server.set_weight_version(3)
    assert backend.weight_version() is None and backend.generate(ASKED[:1], Sampling(4)) == [None]
    with pytest.raises(UserError, match=r"weights of version 3 .*model\.path; start it again"):
        update(backend, engine, 2)


def test_adapters_that_a_killed_run_left_behind_go(rollout, engine, control):
    killed = rollout(servers=(control.server.url,))
    update(killed, engine, 1)
    left = server_of(killed).loaded()
    backend = rollout(servers=(control.server.url,))
    assert backend.weight_version() is None  # it is not this run's, though its version is 1
    update(backend, engine, 1)
    assert len(left) == len(server_of(backend).loaded()) == 1 and left != server_of(backend).loaded()


def test_no_adapter_travels_between_pause_and_resume(rollout, engine, control):
    backend = rollout(servers=(control.server.url,))
    update(backend, engine, 1)
    backend.pause()
    calls = [control.calls(path) for path in (LOAD, "/unload_lora_adapter")]
    with pytest.raises(ValueError, match=r"between pause\(\) and resume\(\)"):
        update(backend, engine, 2)
    assert [control.calls(path) for path in (LOAD, "/unload_lora_adapter")] == calls
    backend.resume()
    assert worst(engine, 1, backend.generate(ASKED, Sampling(4))) <= PARITY
    update(backend, engine, 2)
    assert backend.weight_version() == 2


def test_an_update_neither_pauses_nor_flushes(rollout, engine, control):
    backend = rollout(servers=(control.server.url,))
    stopping = ("/pause_generation", "/flush_cache", "/begin_weight_update", "/update_weight_version")
    calls = [control.calls(path) for path in stopping]
    update(backend, engine, 1)
    assert [control.calls(path) for path in stopping] == calls


# --------------------------------------------------------------------------------------------------------------- start

UNFIT = {
    "without adapters": {"enable_lora": False},
    "of rank 3 at most": {"max_lora_rank": 3},
    "computes with 1 adapter": {"max_loras_per_batch": 1},
    "max-loaded-loras": {"max_loaded_loras": 1},
    "--dp-size 2": {"dp_size": 2},
    "no adapters for o_proj": {"lora_target_modules": TARGETS.replace("o_proj ", "").split()},
}


@pytest.mark.parametrize("told", UNFIT)
def test_a_server_that_cannot_serve_the_adapter_is_refused_at_the_start(rollout, engine, control, told):
    control.options(**UNFIT[told])
    with pytest.raises(UserError, match=rf"rollout\.servers: {control.server.url}.*{told}.*lora\.rank=4.*{OPTIONS}"):
        rollout(servers=(control.server.url,))


def test_a_server_with_the_weights_of_another_run_is_refused_at_the_start(rollout, engine, control):
    control.server.set_weight_version(3)
    with pytest.raises(UserError, match=r"weights of version 3 .*model\.path; start it again"):
        rollout(servers=(control.server.url,))


@pytest.fixture
def both_urls(control, second_with_adapters) -> tuple[str, str]:
    return (control.server.url, second_with_adapters.url)


# ------------------------------------------------------------------------------------------------------------ families

SERVED = {
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": None},
    "ministral-3": {},
    "qwen3-moe": {"moe_intermediate_size": 32},
    "mixtral": {"sliding_window": None},
    "glm-4.5": {"moe_intermediate_size": 32},
}
OF_EXPERTS = ("qwen3-moe", "mixtral", "glm-4.5")  # whose own adapters are multiplied by Triton's kernels
# What a published config.json has, SGLang reads and transformers does not write.
SAYS = {"ministral-3": {"original_max_position_embeddings": 16}}


@pytest.mark.sglang
@pytest.mark.parametrize("family", SERVED)
def test_a_family_is_served_as_the_engine_computes_it(one_rank, family, unused_url, tmp_path):
    """By options that the run gives its own servers."""
    path = families.write_folder(family, tmp_path / "model", seed=0, **{**SIZES, **SERVED[family]})
    lora = replace(LORA, targets=("attention",)) if family in OF_EXPERTS else LORA
    engine = make_engine(path, lora, precision="fp32")
    assert not list(refusals(engine.arch, lora))
    if family in SAYS:
        config = path / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | SAYS[family]))
    command = COMMANDS["sglang"]
    backend = fleet(engine, path, tmp_path / "logs", servers=(unused_url,), server_command=command, timeout=200.0)
    try:
        for version in (1, 2):
            update(backend, engine, version)
            found = backend.generate(ASKED, Sampling(24))
            assert worst(engine, version, found) <= PARITY and apart(engine, found) > 0.1
    finally:
        backend.close()
