"""What goes wrong with servers, injected into the double: each a retry, a None, or one clear line."""

import threading

import pytest
import torch
import torch.distributed as dist
from support.servers.servers import buckets, on_two_ranks, policy, requests, worst
from transformers import AutoModelForCausalLM

from isoloss.engine.rl.backends.sglang.server import SGLangServer
from isoloss.engine.rl.backends.sglang.weights import TensorSync
from isoloss.engine.rl.trajectory import Sampling
from isoloss.parallel import UserError
from isoloss.parallel.runtime import versions

from .conftest import Control

PARITY = 1e-5


def check(rollout, model, number=4) -> None:
    """Every completion is there, whole, and of the model."""
    completions = rollout.generate(requests(number), Sampling(8))
    for request, completion in zip(requests(number), completions):
        assert completion is not None and completion.finish == "length" and len(completion.tokens) == 8
        assert worst(model, request, completion) <= PARITY


# ------------------------------------------------------------------------------------------------------ several servers


@pytest.mark.parametrize("way", ["broadcast", "tensor", "disk"])
def test_all_servers_are_updated_and_share_the_work(backend, both, first, second, way):
    rollout, model = backend(way, servers=both, concurrency=4), policy(1)
    for version in (1, 2):  # the second update meets the process group of the first
        rollout.update_weights(buckets(model), version)
        assert rollout.weight_version() == version
    assert first.server.checksums() == second.server.checksums()
    before = first.calls("/generate"), second.calls("/generate")
    check(rollout, model, 8)
    shares = first.calls("/generate") - before[0], second.calls("/generate") - before[1]
    assert sum(shares) == 8 and min(shares) >= 2


def test_servers_that_end_with_other_weights_are_told(backend, both, second):
    rollout = backend(servers=both)
    rollout.update_weights(buckets(policy(1)), 1)
    second.options(loses="model.norm.weight")
    with pytest.raises(UserError, match=r"differ in 1 weights, the first of them model\.norm\.weight"):
        rollout.update_weights(buckets(policy(2)), 2)
    assert rollout.weight_version() is None


@pytest.mark.parametrize(("nccl", "refused"), [("2.29.7", True), ("2.28.3", False), (None, False)])
def test_no_group_is_formed_with_servers_of_another_nccl(backend, second, nccl, refused, monkeypatch):
    """The server says that it is on a GPU, and the trainer believes that it is."""
    second.options(device="cuda")
    rollout, weights = backend("broadcast", servers=(second.server.url,)), list(buckets(policy(1)))
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(versions, "installed_nccl", {"13.0": nccl}.__getitem__)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dist, "TCPStore", joins)
    with pytest.raises(UserError if refused else Joined) as ended:
        rollout.update_weights(weights, 1)
    if refused:
        told = str(ended.value)
        assert f"{second.server.url} is SGLang 0.5.23, which comes with NCCL 2.30.7, and here is NCCL 2.29.7" in told
        assert "set rollout.weight_sync=tensor" in told and told.endswith("or disk") and "\n" not in told
    assert rollout.weight_version() is None


class Joined(Exception):
    """A group would have been formed."""


def joins(*args, **options):
    raise Joined


def test_a_router_gets_the_requests_and_the_servers_the_rest(backend, both, first, second):
    rollout, model = backend(servers=both, router=second.server.url), policy(1)
    rollout.update_weights(buckets(model), 1)
    before = first.calls("/generate")
    check(rollout, model)
    assert first.calls("/generate") == before
    first.server.set_weight_version(9)  # the router would send requests there, too
    assert rollout.generate(requests(2), Sampling(8)) == [None, None]


def test_a_server_that_comes_up_behind_a_router_ends_the_batch_soon(backend, both, first, second):
    """The router would go on asking it, and its answers are of other weights: the loop has to send ours first."""
    rollout = backend(servers=both, router=second.server.url)
    rollout.update_weights(buckets(policy(1)), 1)
    second.inject("other weights", count=1000)
    threading.Timer(0.5, first.server.set_weight_version, (9,)).start()
    assert rollout.generate(requests(2), Sampling(8)) == [None, None]
    counts = rollout.take_counts()
    assert counts["completions_lost"] == 2 and counts["requests_retried"] >= 2


def test_a_server_with_other_weights_gets_no_requests(backend, both, first):
    rollout, model = backend(servers=both), policy(1)
    rollout.update_weights(buckets(model), 1)
    first.server.set_weight_version(9)
    before = first.calls("/generate")
    check(rollout, model)
    assert first.calls("/generate") == before and rollout.weight_version() is None


# ------------------------------------------------------------------------------------------------------- passing faults


@pytest.mark.parametrize("kind", ["500", "truncate"])
def test_a_passing_fault_is_tried_again(backend, first, kind):
    rollout, model = backend(servers=(first.server.url,)), policy(1)
    rollout.update_weights(buckets(model), 1)
    before = first.calls("/generate")
    first.inject(kind, count=3)
    check(rollout, model)
    assert first.calls("/generate") - before == 4 + 3


def test_a_fault_that_stays_is_told(backend, first):
    rollout = backend(servers=(first.server.url,), timeout=2.0)
    rollout.update_weights(buckets(policy(1)), 1)
    first.inject("500", count=1000)
    with pytest.raises(UserError, match=r"status 500: injected; .*rollout.timeout=2 seconds"):
        rollout.generate(requests(2), Sampling(8))


def test_a_server_that_hangs_is_left_alone(backend, both, first):
    rollout, model = backend(servers=both, timeout=3.0), policy(1)
    rollout.update_weights(buckets(model), 1)
    first.inject("hang", count=100)
    before = first.calls("/generate")
    check(rollout, model)
    assert 1 <= first.calls("/generate") - before <= 2  # what was sent before the first of them gave up


def test_a_dead_server_passes_its_requests_on(backend, start, double, first):
    third = Control(start(double.command))
    rollout, alone = (
        backend(servers=servers, timeout=5.0) for servers in ((first.server.url, third.server.url), (third.server.url,))
    )
    model = policy(1)
    rollout.update_weights(buckets(model), 1)
    alone.update_weights(buckets(model), 1)
    third.inject("die")
    check(rollout, model)
    assert rollout.weight_version() is None
    with pytest.raises(UserError, match=rf"{third.server.url}/model_info.*rollout.server_command"):
        rollout.update_weights(buckets(model), 2)
    assert rollout.weight_version() is None
    with pytest.raises(UserError, match=rf"\['{third.server.url}'\]: none answers.*rollout.server_command"):
        alone.generate(requests(2), Sampling(8))
    with pytest.raises(UserError, match=rf"{third.server.url}/health.*rollout.server_command"):
        alone.check_health()


# --------------------------------------------------------------------------------------------------------- the protocol


def test_a_server_that_comes_late_is_waited_for(backend, start, double, unused_url):
    """As where trainer and servers are started together, by somebody else than the trainer."""
    threading.Timer(2.0, start, (double.command, unused_url)).start()
    rollout = backend(servers=(unused_url,))
    rollout.update_weights(buckets(policy(1)), 1)
    check(rollout, policy(1))


def test_a_server_that_dies_in_an_update_ends_it(backend, start, double):
    """Neither side waits for the other for ever, though one of the two sides of a broadcast is gone."""
    url = start(double.command)
    rollout = backend("broadcast", servers=(url,), timeout=30.0)
    rollout.update_weights(buckets(policy(1)), 1)
    Control(url).inject("die", "/update_weights_from_distributed")
    with pytest.raises(UserError, match=rf"{url}/update_weights_from_distributed"):
        rollout.update_weights(buckets(policy(1)), 2)


def test_an_older_server_without_sessions(backend, second):
    """Asked once, and not again."""
    second.options(without_sessions=True)
    rollout, model = backend("broadcast", servers=(second.server.url,)), policy(6)
    before = second.calls("/begin_weight_update"), second.calls("/end_weight_update")
    for version in (1, 2):
        rollout.update_weights(buckets(model), version)
    check(rollout, model)
    assert (second.calls("/begin_weight_update"), second.calls("/end_weight_update")) == (before[0] + 1, before[1])


def test_weights_on_disk_are_a_model(backend, first, tmp_path):
    rollout = backend("disk", servers=(first.server.url,))
    for version in (1, 2):
        rollout.update_weights(buckets(policy(version)), version)
    (folder,) = (tmp_path / "sync").iterdir()  # those of the update before are gone
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(loaded[name].equal(tensor) for name, tensor in policy(2).state_dict().items())


def test_disk_needs_a_folder(backend, first):
    with pytest.raises(UserError, match=r"rollout\.sync_dir=None"):
        backend("disk", servers=(first.server.url,), sync_dir=None)


# ------------------------------------------------------------------------------------------------------------ colocated


@pytest.mark.parametrize("keeps_weights", [False, True])
def test_colocated_servers_sleep_between_generations(backend, second, keeps_weights):
    """The double loses weights that are given back without a backup, and dies of tokens made while it sleeps."""
    second.options(memory_saver=True, keeps_weights=keeps_weights)
    rollout, model = backend(servers=(second.server.url,), colocated=True), policy(1)
    path = "/release_memory_occupation"
    assert rollout.weight_version() is None  # of weights that nobody sent yet: the servers sleep on
    for version in (1, 2):
        rollout.update_weights(buckets(model), version)
        for _ in range(2):
            before = second.calls(path)
            check(rollout, model)
            assert second.calls(path) == before + 1
    rollout.update_weights(buckets(model), 3)
    rollout.wake(["weights", "kv_cache"])


@pytest.mark.parametrize("keeps_weights", [False, True])
def test_colocated_servers_have_their_weights_alone_while_they_are_sent(backend, second, keeps_weights):
    """From the start on, whatever they had; then all of their memory, and of the weights what survives none."""
    second.options(memory_saver=True, keeps_weights=keeps_weights)
    rollout, model = backend(servers=(second.server.url,), colocated=True), policy(1)
    server = rollout._servers[0]
    asleep = {"kv_cache", "weights"} if keeps_weights else {"kv_cache"}
    seen: list[set[str]] = []

    def noting():
        for bucket in buckets(model):
            seen.append(set(server.asleep))
            yield bucket

    assert server.asleep == asleep
    rollout.wake(["weights", "kv_cache"])  # as a server that came up anew
    rollout.update_weights(noting(), 1)
    assert seen and all(each == {"kv_cache"} for each in seen)
    assert isinstance(rollout._sync, TensorSync) and rollout._sync._held is None  # no rank keeps the last bucket
    check(rollout, model)
    assert server.asleep == asleep
    rollout.wake(["weights", "kv_cache"])


def test_a_colocated_server_that_is_gone_needs_no_sleep(backend, first, second, unused_url):
    second.options(memory_saver=True, keeps_weights=False)
    rollout, model = backend(servers=(second.server.url,), colocated=True), policy(1)
    rollout.update_weights(buckets(model), 1)
    rollout._servers.append(SGLangServer(unused_url, 5.0))
    check(rollout, model)
    rollout._servers.pop().close()
    rollout.wake(["weights", "kv_cache"])


def test_colocated_needs_servers_that_give_memory_back(backend, second):
    with pytest.raises(UserError, match=r"rollout.colocated=true .*--enable-memory-saver"):
        backend(servers=(second.server.url,), colocated=True)


# -------------------------------------------------------------------------------------------------- processes and ranks


@pytest.mark.parametrize(
    ("command", "timeout", "says"),
    [
        (
            "bash -c 'echo no model; exit 3'",
            20.0,
            r"ended twice: fix .*no model \| the command ended with status 3",
        ),
        ("bash -c 'echo loading; sleep 60'", 1.0, r"rollout.timeout=1 seconds: fix .*server-\d+\.log.*loading"),
        (
            "serve {modell}",
            20.0,
            r"rollout.server_command='serve {modell}' cannot be read",
        ),
    ],
)
def test_a_command_that_starts_no_server(backend, unused_url, command, timeout, says):
    with pytest.raises(UserError, match=says):
        backend(servers=(unused_url,), server_command=command, timeout=timeout)


@pytest.mark.parametrize("way", ["broadcast", "tensor", "disk"])
def test_every_rank_hears_of_everything(pool, double, tmp_path, way):
    ranks = pool.run(2, on_two_ranks, double.url, way, str(double.model), str(tmp_path))
    assert ranks[0] == ranks[1]
    seen, model = ranks[0], policy(5)
    assert seen["version"] == 3
    for request, completion in zip(requests(3), seen["completions"]):
        assert worst(model, request, completion) <= PARITY
    *refused_updates, refused_request = seen["mistakes"]
    assert all("Failed to update" in told for told in refused_updates) and "row:9" in refused_request
    assert seen["claimed"] == [(None, 3), (None, 5), (5, 5)]  # a mixture is never taken for a version
    assert seen["drawn"] == 6 * len(list(model.parameters()))  # to the end, the refused ones too
