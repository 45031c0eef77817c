"""Whole runs that train an adapter, on servers that serve it."""

import json
from pathlib import Path

import pytest
from support.runs.runs import rows_of
from support.servers import server_runs
from support.servers.adapters import OPTIONS
from support.servers.server_commands import DOUBLE

from .conftest import Control

LORA = ("lora.rank=4", "lora.alpha=16", "optim.lr=3e-2", "model.from_scratch=false")
TARGETS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return server_runs.write_inputs(tmp_path_factory.mktemp("inputs"))


def command_of(inputs: Path, options: str = "") -> str:
    return f"{DOUBLE.replace('{model}', str(inputs / 'model'))} {options}"


def rows(out: Path, versions: bool = True) -> list[dict]:
    metrics = rows_of(out / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert all(row["weight_versions"] == [row["step"] - 1] for row in rows_of(out / "rollouts.jsonl"))
    return metrics


def test_a_run_starts_its_own_servers_with_adapters(inputs, unused_url, tmp_path):
    """And the log-probabilities that they tell are the trainer's at every step, with the adapter of the step."""
    overrides = server_runs.overrides_of(inputs, tmp_path / "run", [unused_url])
    command = json.dumps(command_of(inputs))
    assert server_runs.run([*overrides, *LORA, f"rollout.server_command={command}"]) == 0
    metrics = rows(tmp_path / "run")
    assert all(0 < row["train_rollout_logprob_diff"] <= 1e-5 for row in metrics)
    assert not any(row[name] for row in metrics for name in ("servers_lost", "requests_retried", "syncs_retried"))


def test_a_server_that_dies_in_a_batch_gets_the_adapter_when_it_is_back(start, inputs, tmp_path):
    """With none: the other server takes over what it had."""
    options = f"--returns 2 {OPTIONS} {TARGETS}"
    servers = [start(command_of(inputs, options)) for _ in range(2)]
    Control(servers[0]).inject("die")
    overrides = server_runs.overrides_of(inputs, tmp_path / "run", servers)
    assert server_runs.run([*overrides, *LORA, "rollout.concurrency=1"]) == 0
    metrics = rows(tmp_path / "run")
    assert all(0 < row["train_rollout_logprob_diff"] <= 1e-5 for row in metrics)
    assert sum(row["servers_lost"] for row in metrics) == sum(row["servers_returned"] for row in metrics) == 1


def test_a_server_that_answers_by_the_model_shows_in_the_first_batch_after_a_step(start, inputs, tmp_path):
    """At first both are the same: B begins at 0."""
    url = start(command_of(inputs, f"--answers-by-the-model {OPTIONS} {TARGETS}"))
    overrides = server_runs.overrides_of(inputs, tmp_path / "run", [url])
    assert server_runs.run([*overrides, *LORA]) == 0
    first, *later = (row["train_rollout_logprob_diff"] for row in rows(tmp_path / "run"))
    assert 0 < first <= 1e-5 and min(later) > 1e-4


def test_weights_that_servers_cannot_have_are_refused(inputs, unused_url, tmp_path, capsys):
    overrides = server_runs.overrides_of(inputs, tmp_path / "run", [unused_url])
    assert server_runs.run([*overrides, *LORA[:-1], "model.from_scratch=true"]) == 2
    assert "model.from_scratch=true makes weights that no server has" in capsys.readouterr().err
