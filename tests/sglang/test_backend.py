"""The backend against a server that speaks SGLang's protocol: the double, and with `-m sglang` SGLang itself."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
import torch
from support.runs.waiting import LONG, until
from support.servers.servers import MODEL, VOCAB, buckets, greedy, policy, requests, worst

from isoloss.engine.rl.backends.servers.server import Refused
from isoloss.engine.rl.backends.sglang.server import SGLangServer
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.parallel import UserError

pytestmark = pytest.mark.usefixtures("service")  # every test runs once a kind of server

PARITY = 1e-5
CONTEXT = MODEL["max_position_embeddings"]
WAYS = ("disk", "broadcast", "tensor")


@pytest.fixture
def raw(service) -> Iterator[SGLangServer]:
    server = SGLangServer(service.url, 60.0)
    yield server
    server.close()


@pytest.fixture
def long(service) -> int:
    """So many tokens that a completion can be interrupted."""
    return 700 if service.real else 150


class Background:
    """A generation in another thread."""

    def __init__(self, backend, asked, sampling):
        self.completions = None
        self._thread = threading.Thread(target=self._run, args=(backend, asked, sampling), daemon=True)
        self._thread.start()

    def _run(self, backend, asked, sampling):
        self.completions = backend.generate(asked, sampling)

    def wait_for(self, number: int, url: str) -> None:
        """Until the server has made tokens for so many requests."""
        server = SGLangServer(url, 60.0)
        running = lambda: server.get("/v1/loads?include=core")["loads"][0]["num_running_reqs"] >= number
        until(running, f"{number} requests were running", lambda: self.completions is None)
        server.close()

    def result(self):
        self._thread.join(LONG)
        assert self.completions is not None
        return self.completions


# ---------------------------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(0.0, 1.0, -1), (1.0, 1.0, -1), (0.6, 1.0, -1), (1.0, 0.7, -1), (1.0, 1.0, 3)]
)
def test_logprobs_are_those_of_the_whole_vocabulary(backend, temperature, top_p, top_k):
    rollout, model, asked = backend(), policy(1), requests(6)
    rollout.update_weights(buckets(model), 1)
    completions = rollout.generate(asked, Sampling(24, temperature, top_p, top_k=top_k))
    assert [c.id for c in completions] == [r.id for r in asked]
    for request, completion in zip(asked, completions):
        assert worst(model, request, completion, temperature) <= PARITY
        assert completion.finish == "length" and len(completion.tokens) == 24
        assert temperature > 0 or completion.tokens == greedy(model, request, 24)


def test_each_completion_is_told_of_when_it_ends(backend):
    """Beside the caller as well; what was told to end comes back as a partial completion, and goes on from there."""
    rollout, model, asked = backend(concurrency=2), policy(1), requests(6)
    rollout.update_weights(buckets(model), 1)
    told: list[Completion] = []
    found = rollout.generate(asked, Sampling(8), told.append)
    assert sorted(told, key=lambda completion: completion.id) == found
    several, first = threading.Event(), []
    futures = [rollout.submit(request, Sampling(200)) for request in asked]
    for future in futures:
        future.add_done_callback(lambda future: (first.append(future.result()), several.set()))
    assert several.wait(LONG)
    rollout.abort()
    found = [future.result(LONG) for future in futures]
    assert [c.id for c in found] == [r.id for r in asked] and found[-1].finish == "abort"
    assert first[0].finish == "length" and all(completion in found for completion in first)
    again = [replace(request, partial=c) for request, c in zip(asked, found) if c.finish == "abort"]
    for request, completion in zip(again, rollout.generate(again, Sampling(200))):
        assert completion.tokens[: len(request.partial.tokens)] == request.partial.tokens
        assert completion.finish == "length" and worst(model, request, completion) <= PARITY


def test_a_stop_token_ends_the_completion_and_is_in_it(backend):
    rollout, model = backend(), policy(1)
    rollout.update_weights(buckets(model), 1)
    (request,) = requests(1)
    whole = greedy(model, request, 20)
    stop = whole[7]
    (completion,) = rollout.generate([request], Sampling(20, 0.0, stop_token_ids=(stop,)))
    assert completion.finish == "stop"
    assert completion.tokens == whole[: whole.index(stop) + 1]
    assert worst(model, request, completion) <= PARITY


def test_only_our_stop_tokens_stop(backend, service):
    """The model's config.json names an end-of-sequence token, at which the server would stop; here it is likelier
    than the likeliest one."""
    rollout, model, asked = backend(), policy(1), requests(16)
    eos, ours = model.config.eos_token_id, VOCAB - 1
    with torch.no_grad():
        model.lm_head.weight[eos] = 4 * model.lm_head.weight[greedy(model, asked[0], 1)[0]]
    rollout.update_weights(buckets(model), 1)
    for stops in ((), (ours,)):
        completions = rollout.generate(asked, Sampling(48, 1.0, stop_token_ids=stops))
        assert any(eos in completion.tokens[:-1] for completion in completions)
        for request, completion in zip(asked, completions):
            assert worst(model, request, completion) <= PARITY
            if completion.finish == "length":
                assert len(completion.tokens) == 48 and not set(stops) & set(completion.tokens)
            else:
                assert completion.finish == "stop" and completion.tokens.index(ours) == len(completion.tokens) - 1


def test_a_request_longer_than_the_context_is_the_users_to_mend(backend):
    rollout = backend()
    rollout.update_weights(buckets(policy(1)), 1)
    too_long = Request("train.jsonl:3/0/1", tuple([5] * (CONTEXT + 1)))
    with pytest.raises(UserError, match=rf"train\.jsonl:3/0/1 .*{CONTEXT} tokens.*shorten the prompt"):
        rollout.generate([*requests(3), too_long], Sampling(4))
    with pytest.raises(UserError, match=rf"context length of {CONTEXT} tokens.*rollout.max_new_tokens"):
        rollout.generate(requests(1), Sampling(CONTEXT))
    assert None not in rollout.generate(requests(2), Sampling(4))


def test_before_any_update_nothing_is_generated(backend):
    """The server has weights, but they are not ours."""
    rollout = backend()
    assert rollout.weight_version() is None
    assert rollout.generate(requests(2), Sampling(4)) == [None, None]


# ------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("way", WAYS)
def test_an_update_is_what_the_server_then_serves(backend, raw, way):
    rollout, asked = backend(way), requests(4)
    sums = []
    for version, seed in ((1, 11), (2, 12), (7, 11)):
        model = policy(seed)
        rollout.update_weights(buckets(model), version)
        assert rollout.weight_version() == version
        sums.append(raw.checksums())
        for sampling in (Sampling(8, 0.0), Sampling(8, 1.0)):
            for request, completion in zip(asked, rollout.generate(asked, sampling)):
                assert worst(model, request, completion) <= PARITY
                assert set(completion.versions) == {version}
    assert sums[0] == sums[2] != sums[1]


def test_the_ways_leave_the_same_weights(backend, raw):
    """Every weight of the server, by its own checksums: also those that no short completion would show."""
    model, sums = policy(21), []
    for version, way in enumerate(WAYS):
        backend(way).update_weights(buckets(policy(20)), 2 * version)
        other = raw.checksums()
        backend(way).update_weights(buckets(model), 2 * version + 1)
        sums.append(raw.checksums())
        assert all(other[0][name] != checksum for name, checksum in sums[-1][0].items())
    assert sums[0] == sums[1] == sums[2]


def test_types_and_sizes_of_a_bucket_may_differ(backend):
    """bfloat16 weights among float32 ones, in any order: each must begin at a multiple of its item size."""
    model = policy(3)
    mixed = [
        (name, tensor.bfloat16() if k % 3 == 0 else tensor.clone())
        for k, (name, tensor) in enumerate(next(buckets(model, 1000)))
    ]
    with torch.no_grad():
        for name, tensor in mixed:
            model.get_parameter(name).copy_(tensor)
    for version, way in enumerate(("tensor", "broadcast")):
        rollout = backend(way)
        rollout.update_weights([mixed[::2], mixed[1::2]], version)
        for request, completion in zip(requests(3), rollout.generate(requests(3), Sampling(12))):
            assert worst(model, request, completion) <= PARITY


def test_weights_without_a_session_are_refused(raw):
    for path in ("/update_weights_from_tensor", "/update_weights_from_distributed"):
        body = {"serialized_named_tensors": [""], "names": [], "dtypes": [], "shapes": [], "group_name": "none"}
        with pytest.raises(Refused, match=r"must run between begin_weight_update\(\) and end_weight_update\(\)"):
            raw.post(path, {**body, "load_format": "flattened_bucket"})


def test_a_failed_update_is_told_and_the_next_one_mends_it(backend, raw):
    rollout, model = backend("broadcast", timeout=20.0), policy(4)
    rollout.update_weights(buckets(model), 1)
    name = "model.layers.1.mlp.down_proj.weight"
    drawn = []

    def spoiled():
        for bucket in buckets(model):
            drawn.append(len(bucket))
            yield [(n, tensor[:-1] if n == name else tensor) for n, tensor in bucket]

    with pytest.raises(UserError, match="Failed to update parameter online"):
        rollout.update_weights(spoiled(), 2)
    assert sum(drawn) == len(list(model.named_parameters()))  # to its end: other ranks may be in it
    assert rollout.weight_version() is None
    assert rollout.generate(requests(1), Sampling(4)) == [None]
    rollout.update_weights(buckets(model), 3)
    assert rollout.weight_version() == 3
    (completion,) = rollout.generate(requests(1), Sampling(12))
    assert worst(model, requests(1)[0], completion) <= PARITY


def test_a_session_that_was_left_open_is_taken_over(backend, raw):
    raw.begin_update()
    rollout, model = backend("tensor"), policy(5)
    rollout.update_weights(buckets(model), 1)
    assert rollout.weight_version() == 1


def test_weights_of_somebody_else_are_not_ours(backend, raw):
    rollout = backend()
    rollout.update_weights(buckets(policy(1)), 1)
    raw.set_weight_version(8)
    assert rollout.weight_version() is None
    assert rollout.generate(requests(1), Sampling(4)) == [None]


# ------------------------------------------------------------------------------------------------- pause, resume, abort


def test_abort_and_go_on(backend, service, long):
    """What an abort leaves, and what was not even begun, becomes whole by asking again."""
    rollout, model, asked = backend(concurrency=2), policy(1), requests(4)
    rollout.update_weights(buckets(model), 1)
    sampling = Sampling(long)
    running = Background(rollout, asked, sampling)
    running.wait_for(2, service.url)
    rollout.abort()
    parts = running.result()
    assert {part.finish for part in parts} == {"abort"}
    assert all(0 < len(part.tokens) < long for part in parts[:2]) and not any(part.tokens for part in parts[2:])
    again = [Request(r.id, r.prompt_tokens, part) for r, part in zip(asked, parts)]
    for request, part, whole in zip(asked, parts, rollout.generate(again, sampling)):
        assert whole.finish == "length" and len(whole.tokens) == long
        assert whole.tokens[: len(part.tokens)] == part.tokens and whole.logprobs[: len(part.tokens)] == part.logprobs
        assert worst(model, request, whole) <= PARITY


def test_pause_and_resume(backend, service, long):
    rollout, model, asked = backend(), policy(1), requests(3)
    rollout.update_weights(buckets(model), 1)
    running = Background(rollout, asked, Sampling(long))
    running.wait_for(3, service.url)
    rollout.pause()
    time.sleep(1.0)
    assert running.completions is None
    rollout.resume()
    for request, completion in zip(asked, running.result()):
        assert completion.finish == "length" and worst(model, request, completion) <= PARITY


@pytest.mark.parametrize("way", WAYS)
def test_an_update_in_the_middle_of_a_completion(backend, service, way, long):
    """Each token has the version of the weights that made it, and their log-probability."""
    rollout, before, after, asked = backend(way), policy(1), policy(2), requests(4)
    rollout.update_weights(buckets(before), 1)
    running = Background(rollout, asked, Sampling(long))
    running.wait_for(4, service.url)
    rollout.pause()
    rollout.update_weights(buckets(after), 2)
    time.sleep(0.1)
    assert running.completions is None  # the update has not undone the pause
    rollout.resume()
    for request, completion in zip(asked, running.result()):
        switch = completion.versions.index(2)
        assert completion.versions == (1,) * switch + (2,) * (long - switch) and 0 < switch < long
        assert worst(before, request, completion, version=1) <= PARITY
        assert worst(after, request, completion, version=2) <= PARITY


def test_abort_reaches_what_a_pause_kept_waiting(backend, long):
    rollout = backend()
    rollout.update_weights(buckets(policy(1)), 1)
    rollout.pause()
    running = Background(rollout, requests(3), Sampling(long))
    time.sleep(0.3)
    rollout.abort()
    rollout.resume()
    assert all(c.finish == "abort" and len(c.tokens) < long for c in running.result())


def test_a_pause_that_a_killed_run_left_behind(backend, raw):
    raw.pause()
    rollout, model = backend("tensor", timeout=20.0), policy(1)
    rollout.update_weights(buckets(model), 1)
    assert rollout.weight_version() == 1
    rollout.pause()
    rollout.check_health()  # to SGLang a paused server is not healthy, to us it is
    rollout.resume()
    assert None not in rollout.generate(requests(1), Sampling(4))


def test_memory_is_released_and_resumed(raw):
    raw.release_memory(["kv_cache"])
    raw.resume_memory(["kv_cache"])
    raw.check_health()


# ---------------------------------------------------------------------------------------------------------- life, death


def test_a_server_that_is_not_there(backend):
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9/health: .*timeout=1 seconds.*rollout.server_command"):
        backend(servers=("http://127.0.0.1:9",), timeout=1.0)


def test_a_killed_server_is_restarted_and_synced_again(backend, service, unused_url, long):
    """The loop's side of it: completions that are None, no weight version, an update, and on."""
    mine, model = psutil.Process(), policy(1)
    before = set(mine.children(recursive=True))
    rollout = backend("broadcast", servers=(unused_url,), server_command=service.command)
    started = set(mine.children(recursive=True)) - before
    rollout.update_weights(buckets(model), 1)
    running = Background(rollout, requests(3), Sampling(long))
    running.wait_for(3, unused_url)
    for process in started:
        process.kill()
    assert running.result() == [None] * 3
    assert rollout.weight_version() is None
    rollout.update_weights(buckets(model), 2)
    assert rollout.weight_version() == 2
    for request, completion in zip(requests(3), rollout.generate(requests(3), Sampling(8))):
        assert worst(model, request, completion) <= PARITY
    rollout.close()
    psutil.wait_procs(set(mine.children(recursive=True)) - before, timeout=10)
    assert not set(mine.children(recursive=True)) - before
