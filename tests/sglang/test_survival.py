"""Whole runs whose servers die, come back by themselves, or ask for a key."""

import json
from pathlib import Path

import pytest
from support.runs.runs import rows_of
from support.servers import server_runs
from support.servers.server_commands import DOUBLE
from support.servers.servers import buckets, policy, requests, worst

from isoloss.engine.rl.backends.servers.api_key import ApiKey
from isoloss.engine.rl.backends.sglang.server import SGLangServer
from isoloss.engine.rl.config import RolloutConfig
from isoloss.engine.rl.trajectory import Sampling
from isoloss.parallel import UserError

from .conftest import Control

COUNTS = ("servers_lost", "servers_returned", "requests_retried", "completions_lost", "syncs_retried")
SECRET = "sk-7Qe.planted+secret/9"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return server_runs.write_inputs(tmp_path_factory.mktemp("inputs"))


def check_run(out: Path, steps: int) -> dict[str, int]:
    """Every batch came from the weights of its own step, and the trainer agrees with what the servers told of it; the
    sums of the counts."""
    metrics = rows_of(out / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, steps + 1))
    assert all(0 < row["train_rollout_logprob_diff"] <= 1e-5 for row in metrics)
    assert all(row["weight_versions"] == [row["step"] - 1] for row in rows_of(out / "rollouts.jsonl"))
    return {name: sum(row[name] for row in metrics) for name in COUNTS}


# ---- servers that come back by themselves ---------------------------------------------------------------------------


def start_of(inputs: Path, options: str) -> str:
    """A command of a double of the run's model: the model of the fixtures is another."""
    return f"{DOUBLE.replace('{model}', str(inputs / 'model'))} {options}"


@pytest.mark.parametrize(("dying", "lost"), [(1, 0), (2, 1)])
def test_servers_that_die_in_a_batch_and_come_back_by_themselves(start, inputs, tmp_path, dying, lost):
    """With the weights of their folder: the run gives them its own. Where the other server lives, it takes over."""
    servers = [start(start_of(inputs, "--returns 2")) for _ in range(2)]
    for url in servers[:dying]:
        Control(url).inject("die")
    overrides = server_runs.overrides_of(inputs, tmp_path / "run", servers)
    assert server_runs.run([*overrides, "rollout.concurrency=1"]) == 0
    counts = check_run(tmp_path / "run", 3)
    assert counts["servers_lost"] == counts["servers_returned"] == dying
    assert counts["requests_retried"] == dying and counts["syncs_retried"] == 0
    assert (counts["completions_lost"] > 0) == bool(lost)


def test_a_run_without_trouble_counts_nothing(start, inputs, tmp_path):
    """And an evaluation has a row of its own, whose faults are in no other."""
    (url,) = servers = [start(start_of(inputs, ""))]
    Control(url).inject("500", count=3)  # the evaluation before the first step meets them
    overrides = server_runs.overrides_of(inputs, tmp_path / "run", servers)
    assert server_runs.run([*overrides, f"data.eval={inputs}/prompts.jsonl"]) == 0
    assert set(check_run(tmp_path / "run", 3).values()) == {0}
    first, *others = rows_of(tmp_path / "run" / "eval.jsonl")
    assert first["requests_retried"] == 3 and all(row["requests_retried"] == 0 for row in others)


# ---- the key --------------------------------------------------------------------------------------------------------


def test_the_key_is_in_no_file_and_no_output(inputs, unused_url, tmp_path, monkeypatch, capfd):
    """Though the server, as SGLang does, prints its options, the key among them, into a log of the run."""
    monkeypatch.setenv("KEY_OF_SERVERS", SECRET)
    out = tmp_path / "run"
    command = f"bash -c 'exec {start_of(inputs, '--api-key')} $KEY_OF_SERVERS'"
    overrides = [
        *server_runs.overrides_of(inputs, out, [unused_url]),
        f"rollout.server_command={json.dumps(command)}",
        "rollout.api_key_env=KEY_OF_SERVERS",
        "checkpoint.every=1",
    ]
    assert server_runs.run(overrides) == 0
    assert not any(check_run(out, 3).values())
    said = capfd.readouterr()
    files = [path for path in out.rglob("*") if path.is_file()]
    holding = [path for path in files if SECRET.encode() in path.read_bytes()]
    assert len(files) > 10 and not holding and SECRET not in said.out + said.err
    assert "KEY_OF_SERVERS" in (out / "config.yaml").read_text()
    (log,) = (out / "sglang").iterdir()
    assert "'api_key': '***'" in log.read_text()


@pytest.fixture
def locked(start, double) -> str:
    """A server that asks for the key."""
    return start(f"{double.command} --api-key {SECRET}")


def test_servers_and_router_are_sent_the_key(backend, locked, monkeypatch):
    """A double in the place of a router refuses whoever does not bring it, as servers do."""
    monkeypatch.setenv("KEY_OF_SERVERS", SECRET)
    model = policy(1)
    for more in ({}, {"router": locked}):
        for way in ("tensor", "broadcast"):
            rollout = backend(way, servers=(locked,), api_key_env="KEY_OF_SERVERS", **more)
            rollout.update_weights(buckets(model), 1)
            for request, completion in zip(requests(2), rollout.generate(requests(2), Sampling(4))):
                assert worst(model, request, completion) <= 1e-5


def test_a_server_that_asks_for_a_key_names_ours(backend, locked, double, monkeypatch):
    with pytest.raises(UserError) as missing:
        backend(servers=(locked,))
    told = str(missing.value)
    assert told.startswith(f"rollout.api_key_env=null: {locked}/") and "status 401: Unauthorized; set it to" in told
    monkeypatch.setenv("KEY_OF_SERVERS", "another-secret")
    with pytest.raises(UserError) as wrong:
        backend(servers=(locked,), api_key_env="KEY_OF_SERVERS")
    told = str(wrong.value)
    assert told.startswith(f"rollout.api_key_env=KEY_OF_SERVERS: {locked}/") and "another-secret" not in told
    assert "\n" not in told and "export the key that this server was started with" in told


def test_a_router_that_asks_for_a_key_ends_the_batch(backend, locked, double, monkeypatch):
    """It is asked only when something is to be generated."""
    rollout = backend(servers=(double.url,), router=locked)
    rollout.update_weights(buckets(policy(1)), 1)
    with pytest.raises(UserError, match=rf"rollout\.api_key_env=null: {locked}/generate: status 401"):
        rollout.generate(requests(4), Sampling(4))


def test_what_a_server_repeats_is_told_without_the_key(first):
    server = SGLangServer(first.server.url, 5.0, ApiKey("KEY_OF_SERVERS", "injected"))
    first.inject("500", "/model_info")
    with pytest.raises(Exception, match=r"status 500: \*\*\*$"):
        server.check_alive()
    server.close()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "rollout.api_key_env=KEY_OF_SERVERS: that environment variable is not set; export"),
        ("", "rollout.api_key_env=KEY_OF_SERVERS: that environment variable is empty; export"),
        ("a secret\n", "rollout.api_key_env=KEY_OF_SERVERS: the value of that environment variable holds a space"),
    ],
)
def test_a_variable_without_a_key_is_told_before_anything_is_written(
    inputs, tmp_path, monkeypatch, capsys, value, says
):
    monkeypatch.delenv("KEY_OF_SERVERS", raising=False)
    if value is not None:
        monkeypatch.setenv("KEY_OF_SERVERS", value)
    overrides = server_runs.overrides_of(inputs, tmp_path / "run", ["http://127.0.0.1:9"])
    assert server_runs.run([*overrides, "rollout.api_key_env=KEY_OF_SERVERS"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"isoloss: error: {says}") and "secret" not in line and not (tmp_path / "run").exists()


def test_a_key_that_others_would_see_is_refused(inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KEY_OF_SERVERS", SECRET)
    overrides = server_runs.overrides_of(inputs, tmp_path / "run", ["http://127.0.0.1:9"])
    command = f"rollout.server_command='serve --api-key {SECRET}'"
    assert server_runs.run([*overrides, "rollout.api_key_env=KEY_OF_SERVERS", command]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "rollout.server_command holds the key of rollout.api_key_env=KEY_OF_SERVERS" in line and SECRET not in line
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=r"^rollout\.api_key_env must be the name") as named:
        RolloutConfig(backend="sglang", servers=("http://a:1",), api_key_env=SECRET)
    assert SECRET not in str(named.value)
