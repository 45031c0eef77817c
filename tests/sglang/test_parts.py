"""The parts of the SGLang backend that need no server (tests/sglang has the rest)."""

import base64
import contextlib
import io
import os
import pickletools
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import psutil
import pytest
import torch
from doubles.sglang_server import Unpickler
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runs.terminal import terminal
from support.runs.waiting import LONG, until
from torch.multiprocessing import get_sharing_strategy

from isoloss.engine.rl.backends.servers.fault_counts import NAMES, Incidents
from isoloss.engine.rl.backends.servers.generate import Fleet
from isoloss.engine.rl.backends.servers.process import GUARD, ServerProcess
from isoloss.engine.rl.backends.servers.server import ServerLost
from isoloss.engine.rl.backends.sglang.bucket import flatten, serialize
from isoloss.engine.rl.backends.sglang.group import own_address
from isoloss.engine.rl.backends.sglang.server import SGLangServer, read_reply, sampling_params
from isoloss.engine.rl.trajectory import Request, Sampling
from isoloss.parallel import UserError
from isoloss.parallel.runtime import console, environment, processes

# ---------------------------------------------------------------------------------------------------- replies, requests


def reply(tokens: int, spans=None, version="3", finish="length"):
    meta = {
        "finish_reason": {"type": finish},
        "weight_version": version,
        "output_token_logprobs": [[-0.5 * k, k, None] for k in range(tokens)],
    }
    return {
        "output_ids": list(range(tokens)),
        "meta_info": meta | ({} if spans is None else {"weight_versions": spans}),
    }


def span(version, start, end):
    return {"version": version, "start": start, "end": end}


@pytest.mark.parametrize(
    ("given_spans", "versions"),
    [
        ([span("1", 0, 2), span("3", 2, 5)], (1, 1, 3, 3, 3)),
        ([span("1", 0, 2), span("3", 2, 9)], (1, 1, 3, 3, 3)),  # aborted in the queue: it had made more tokens
        ([span("1", 0, 2)], (1, 1, 3, 3, 3)),
        (None, (3, 3, 3, 3, 3)),  # servers that know of one version only
    ],
)
def test_versions_of_tokens(given_spans, versions):
    completion = read_reply("a", reply(5, given_spans))
    assert completion.versions == versions
    assert completion.tokens == (0, 1, 2, 3, 4) and completion.logprobs == (0.0, -0.5, -1.0, -1.5, -2.0)


def test_nothing_came_out():
    completion = read_reply("a", reply(0, [span("3", 0, 0)], finish="abort"))
    assert (completion.tokens, completion.versions, completion.finish) == ((), (), "abort")


def test_tokens_of_weights_that_are_not_ours_are_lost():
    with pytest.raises(ServerLost, match=r"restarted.*'default'"):
        read_reply("a", reply(4, [span("3", 0, 2), span("default", 2, 4)]))


def test_sampling_seed_is_of_the_run_and_the_request():
    def seed(run: int, name: str) -> int:
        return sampling_params(Request(name, (1,)), Sampling(8, seed=run), 8)["sampling_seed"]

    assert seed(1, "a:1/0/0") == seed(1, "a:1/0/0")
    seeds = {seed(run, f"a:{row}/0/{k}") for run in range(3) for row in range(10) for k in range(4)}
    assert len(seeds) == 120 and all(0 <= each < 2**31 for each in seeds)


def test_the_budget_is_what_is_left():
    sampling = Sampling(8, 0.5, 0.9, (4, 5))
    params = sampling_params(Request("a", (1,)), sampling, 3)
    assert (params["max_new_tokens"], params["temperature"], params["top_p"]) == (3, 0.5, 0.9)
    assert params["top_k"] == -1 and sampling_params(Request("a", (1,)), Sampling(8, top_k=7), 3)["top_k"] == 7
    assert params["stop_token_ids"] == [4, 5] and not params["ignore_eos"]
    assert sampling_params(Request("a", (1,)), Sampling(8), 8)["ignore_eos"]


def test_the_least_busy_server_is_next():
    a, b, c = (SGLangServer(f"http://{name}", 1.0) for name in "abc")
    incidents = Incidents([a, b, c])
    fleet = Fleet([a, b, c], lambda server: server is not b, lambda *_: None, incidents)
    assert [fleet.take() for _ in range(4)] == [a, b, c, a]
    fleet.give(b)
    assert fleet.take() is b and fleet.take(but=b) is c
    fleet.failed(b, ServerLost("gone"))
    fleet.give(b)
    assert fleet.take() is a or fleet.take() is c
    fleet.failed(c, ServerLost("slow", timed_out=True))  # alive, but another request would wait as long
    assert fleet.take() is a and fleet.take(but=a) is a
    fleet.failed(a, ServerLost("slow", timed_out=True))
    assert fleet.take() is None
    assert incidents.take()["servers_lost"] == 3


def test_a_loss_counts_once_until_the_server_is_back():
    """Whoever notices it, and however often; a router is none of the servers."""
    a, b, router = (SGLangServer(f"http://{name}", 1.0) for name in ("a", "b", "router"))
    incidents = Incidents([a, b])
    a.had_ours = True
    for server in (a, a, router, a):
        incidents.lost(server)
    incidents.returned(b)  # it was not away
    incidents.returned(router)
    assert not a.had_ours  # or its weights, which are not ours, would be taken for another loss
    assert incidents.take() == dict.fromkeys(NAMES, 0) | {"servers_lost": 1}
    incidents.returned(a)
    incidents.returned(a)
    incidents.lost(a)
    assert incidents.take() == dict.fromkeys(NAMES, 0) | {"servers_lost": 1, "servers_returned": 1}


# ------------------------------------------------------------------------------------------------------------- buckets

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.uint8)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 4), max_size=3)), min_size=1, max_size=8))
def test_a_bucket_flattens_and_comes_back(parts):
    """Transposed tensors, too; each starts at a multiple of its item size, as SGLang demands."""
    bucket = [
        (f"w{k}", torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype).T if len(shape) == 2 else
         torch.full(shape, k, dtype=dtype))
        for k, (dtype, shape) in enumerate(parts)
    ]  # fmt: skip
    flat = flatten(bucket)
    assert sorted(part.name for part in flat.layout) == sorted(name for name, _ in bucket)
    assert flat.flat_bytes.numel() == sum(tensor.nbytes for _, tensor in bucket)
    for part in flat.layout:
        assert part.start_idx % part.dtype.itemsize == 0 and part.end_idx - part.start_idx == part.numel
        back = flat.flat_bytes[part.start_idx : part.end_idx].view(part.dtype).reshape(part.shape)
        assert torch.equal(back, dict(bucket)[part.name])


def test_a_handle_opens_elsewhere_without_our_code():
    """Its pickle names SGLang's class and torch's, nothing of isoloss, and holds no weights."""
    weight = torch.randn(300, 40)
    flat = flatten([("a.weight", weight), ("b.bias", torch.arange(5.0).bfloat16())])
    before = get_sharing_strategy()
    handle = serialize(flat)
    raw = base64.b64decode(handle)
    classes = {arg for opcode, arg, _ in pickletools.genops(raw) if opcode.name == "GLOBAL"}
    assert "sglang.srt.weight_sync.tensor_bucket FlattenedTensorMetadata" in classes
    assert all(name.split(".")[0].split()[0] in ("sglang", "torch", "_codecs", "collections") for name in classes)
    assert len(raw) < weight.nbytes / 10
    assert get_sharing_strategy() == before
    opened = Unpickler(io.BytesIO(raw)).load()
    part = next(part for part in opened["metadata"] if part.name == "a.weight")
    assert torch.equal(opened["flattened_tensor"][part.start_idx : part.end_idx].view(part.dtype).view(300, 40), weight)


def test_threads_leave_the_sharing_strategy_of_the_process():
    before, flat = get_sharing_strategy(), flatten([("a.weight", torch.randn(3, 4))])
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: serialize(flat), range(400)))
    assert get_sharing_strategy() == before


def test_our_address_as_a_server_sees_it():
    assert own_address("http://localhost:30000") == "127.0.0.1"


# ----------------------------------------------------------------------------------------------------------- processes


def sleeping(pid: int) -> list[psutil.Process]:
    """The commands that stand for servers, below that process. One may end while it is asked for its name."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process] if process.name() == "sleep" else []
    return found


def test_a_server_does_not_outlive_its_run(tmp_path):
    """Neither the command nor what it started, though the run is killed and could not clean up; but it does outlive
    the thread that started it. The run is a process without isoloss, whose imports take seconds."""
    script = f"""
import os, runpy, sys, threading, time
helper = runpy.run_path({processes.__file__!r})["Helper"]
command = ["bash", "-c", "sleep 1001 & echo up > {tmp_path}/up; sleep 1002"]
guard = [sys.executable, "-IS", {str(GUARD)!r}, *command]
thread = threading.Thread(target=lambda: helper(guard))
thread.start()
thread.join()
while not os.path.exists("{tmp_path}/up"):
    time.sleep(0.05)
time.sleep(1.0)
print("up", flush=True)
time.sleep(1000)
"""
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    try:
        assert run.stdout.readline() == "up\n"
        until(lambda: len(sleeping(run.pid)) == 2, "the command and what it started were there")
        family = psutil.Process(run.pid).children(recursive=True)
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    _, alive = psutil.wait_procs(family, timeout=LONG)
    assert not alive


@pytest.mark.parametrize("hides", [[], ["--hide", "API_KEY"]], ids=["without a key", "with one"])
def test_a_server_whose_log_is_on_a_full_disk_goes_on(hides, tmp_path):
    """What it prints is dropped, and what it leaves behind still ends with it."""
    command = ["bash", "-c", f"sleep 1006 & head -c 1000000 /dev/zero 2>/dev/null; touch {tmp_path}/goes-on"]
    with open("/dev/full", "w") as full:
        guard = [sys.executable, "-IS", GUARD, *hides, *command]
        ended = subprocess.run(guard, stdout=full, env=os.environ | {"API_KEY": "1"}, process_group=0, timeout=LONG)
    assert ended.returncode == -signal.SIGKILL and (tmp_path / "goes-on").exists()


def test_a_key_in_the_command_is_not_in_the_log():
    guard = [sys.executable, "-IS", GUARD, "--hide", "API_KEY", "echo", "it is k-1 2"]
    environ = os.environ | {"API_KEY": "k-1 2"}
    ended = subprocess.run(guard, stdout=subprocess.PIPE, env=environ, process_group=0, timeout=LONG)
    assert ended.stdout.splitlines()[:2] == [b"$ echo 'it is ***'", b"it is ***"]


def test_a_log_that_cannot_be_begun_ends_no_run(tmp_path):
    (tmp_path / "server-5.log").symlink_to("/dev/full")
    server = ServerProcess("sleep 1003", "http://127.0.0.1:5", tmp_path, tmp_path)
    server.start()
    assert server.running
    server.stop()


def test_starting_again_ends_what_ran(tmp_path):
    server = ServerProcess("sleep 1003", "http://127.0.0.1:5", tmp_path, tmp_path)
    server.start()
    first = until(lambda: sleeping(os.getpid()), "the command was there")
    server.start()
    _, alive = psutil.wait_procs(first, timeout=LONG)
    assert server.running and not alive
    server.stop()
    assert not server.running
    server.stop()  # twice does no harm


def test_one_that_is_killed_while_it_starts_is_started_once_more(tmp_path, capsys):
    """And no more than once."""
    serves_at_last = f"test -e {tmp_path}/killed && touch {tmp_path}/serves && sleep 1005"
    command = f"bash -c '{serves_at_last}; touch {tmp_path}/killed; kill -9 $$'"
    server = ServerProcess(command, "http://127.0.0.1:5", tmp_path, tmp_path)
    server.start()
    server.wait_ready((tmp_path / "serves").exists, LONG)
    assert server.running and capsys.readouterr().out.count("started once more") == 1
    server.stop()

    server = ServerProcess("bash -c 'kill -9 $$'", "http://127.0.0.1:6", tmp_path, tmp_path)
    server.start()
    with pytest.raises(UserError, match="ended twice"):
        server.wait_ready(lambda: False, LONG)
    assert server.log.read_text().count("$ bash") == 2 and capsys.readouterr().out.count("started once more") == 1


def test_a_start_that_takes_long_is_told(tmp_path, monkeypatch, capsys):
    """In few lines of a log, and on a terminal by a bar that vanishes, also if the server never serves."""
    monkeypatch.setattr(console, "monotonic", count(0, 3).__next__)
    monkeypatch.setattr(f"{ServerProcess.__module__}.POLL_SECONDS", 0.0)
    server, looks = ServerProcess("sleep 1003", "http://127.0.0.1:7", tmp_path, tmp_path), count(1)
    server.start()
    server.wait_ready(lambda: next(looks) > 6, 600.0)
    assert capsys.readouterr().err.splitlines() == [
        f"starting the server for http://127.0.0.1:7  0:00:{seconds:02} of 0:10:00" for seconds in (6, 18)
    ]
    with terminal(monkeypatch, 100) as screen:
        answers = iter([False, False, False])
        with pytest.raises(StopIteration):  # as any failure
            server.wait_ready(lambda: next(answers), 600.0)
        assert screen.read() == [""] and "starting the server for http://127.0.0.1:7" in screen.raw
    server.stop()


def test_a_server_needs_a_port(tmp_path):
    with pytest.raises(UserError, match=r"http://somewhere.*must name a port"):
        ServerProcess("serve", "http://somewhere", tmp_path, tmp_path)


def test_servers_do_not_inherit_torchruns_variables(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LOCAL_MODELS", "kept")
    left = environment.of_other_programs()
    assert left["LOCAL_MODELS"] == "kept" and left["PATH"] == os.environ["PATH"]
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & set(left)
    assert not any(name.startswith("TORCHELASTIC") for name in left)


def test_what_a_command_leaves_behind_ends_with_it(tmp_path):
    """A server's children outlive it: the guard ends them, in the process group that it leads."""
    server = ServerProcess(f"bash -c 'sleep 1004 & echo $! > {tmp_path}/pid'", "http://127.0.0.1:5", tmp_path, tmp_path)
    server.start()
    until(lambda: not server.running, "the server ends")
    left = int((tmp_path / "pid").read_text())
    alive = lambda: psutil.pid_exists(left) and psutil.Process(left).status() != psutil.STATUS_ZOMBIE
    until(lambda: not alive(), "what it left behind ends")  # a killed process takes a moment to be gone
    server.stop()


@pytest.mark.parametrize("command", ["echo serve {port}", "echo serve --enable-lora --max-lora-rank 64"])
def test_options_that_a_server_needs_are_behind_its_command(command, tmp_path):
    """Unless it has the first of them: then they are the user's to choose."""
    server = ServerProcess(
        command, "http://127.0.0.1:5", tmp_path, tmp_path, options=("--enable-lora", "--max-lora-rank", "4")
    )
    server.start()
    until(lambda: not server.running, "the command ends")
    wanted = (
        "serve 5 --enable-lora --max-lora-rank 4" if "{port}" in command else "serve --enable-lora --max-lora-rank 64"
    )
    assert wanted in server.log.read_text().splitlines()
