"""The recipe on servers that it starts: their weights are its own, and what was killed is started again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.runs import warm
from support.runs.runs import typed
from support.runs.waiting import until
from support.servers.server_commands import DOUBLE, SGLANG

from .conftest import free_url

RUN = (sys.executable, "-m")


@pytest.fixture(params=["double", pytest.param("sglang", marks=pytest.mark.sglang)])
def server_command(request) -> str:
    return DOUBLE if request.param == "double" else SGLANG


def arguments(sorter: Path, out: Path, command: str, sync: str, *more: str) -> list[str]:
    return [
        *RUN,
        "isoloss.recipes.grpo",
        *typed(
            "preset=tiny",
            f"model.path={sorter}/hf",
            f"data.train={sorter}/rl.jsonl",
            f"output_dir={out}",
            "data.eval=[]",
            "rollout.backend=sglang",
            f"rollout.servers=[{free_url()}]",
            f"rollout.server_command='{command}'",
            f"rollout.weight_sync={sync}",
            "rollout.timeout=300",
            *more,
        ),
    ]


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_run(out: Path, steps: int) -> None:
    """Every batch came from the weights of its own step, and the trainer agrees with what the server told of it."""
    metrics, rollouts = rows(out / "metrics.jsonl"), rows(out / "rollouts.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, steps + 1))
    assert all(0 < row["train_rollout_logprob_diff"] <= 1e-5 for row in metrics)
    assert all(row["weight_versions"] == [row["step"] - 1] for row in rollouts)
    assert {row["step"] for row in rollouts} == {1, 3, 5}  # two mini-batches a batch
    assert all(row["sync_seconds"] > 0 and row["generate_seconds"] > 0 for row in metrics[::2])
    assert len(rollouts) == 3 * 32 * 8 and len({row["id"] for row in rollouts}) == len(rollouts)
    assert sum(row["reward"] for row in rollouts) / len(rollouts) > 0.15  # other weights than the policy's sort nothing


def left_over(sorter: Path) -> list[psutil.Process]:
    """Processes that were started with the model's folder: the run, and its servers with their guards."""
    return [p for p in psutil.process_iter(["cmdline"]) if any(str(sorter) in part for part in p.info["cmdline"] or ())]


def test_grpo_through_a_server_that_the_recipe_starts(sorter, server_command, tmp_path):
    out = tmp_path / "run"
    done = warm.run(
        arguments(sorter, out, server_command, "broadcast", "train.steps=6"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check_run(out, 6)
    assert not left_over(sorter)
    assert list((out / "sglang").iterdir())  # the server's own output


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["disk", "tensor"])
def test_other_ways_of_weight_sync(sorter, sync, tmp_path):
    out = tmp_path / "run"
    command = arguments(sorter, out, DOUBLE, sync, f"rollout.sync_dir={tmp_path}/sync", "train.steps=6")
    done = warm.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    check_run(out, 6)


def test_two_ranks_share_a_server(sorter, tmp_path):
    out = tmp_path / "run"
    python, *rest = arguments(sorter, out, DOUBLE, "broadcast", "train.steps=6", "parallel.tp=2")
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = warm.run([*launcher, *rest], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    check_run(out, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "keys"),
    (
        (DOUBLE, ()),
        (f"{DOUBLE} --memory-saver --keeps-weights", ("rollout.colocated=true",)),  # dies of tokens made in its sleep
    ),
    ids=("apart", "colocated"),
)
def test_a_killed_server_is_started_again_with_the_present_weights(sorter, tmp_path, command, keys):
    out = tmp_path / "run"
    training = subprocess.Popen(
        arguments(sorter, out, command, "broadcast", "train.steps=6", *keys),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    until(lambda: len(rows(out / "metrics.jsonl")) >= 2, "two steps were done", lambda: training.poll() is None)
    victims = [p for p in left_over(sorter) if p.cmdline()[1].endswith("/sglang_server.py")]
    assert victims
    for victim in victims:
        os.kill(victim.pid, signal.SIGKILL)
    said = training.communicate(timeout=300)[0].decode()
    assert training.returncode == 0, said[-3000:]
    check_run(out, 6)


def test_a_server_that_is_not_there_is_one_line_and_status_2(sorter, tmp_path):
    given = arguments(sorter, tmp_path / "run", DOUBLE, "broadcast")
    command = [part for part in given if not part.startswith(("rollout.server_command=", "rollout.timeout="))]
    done = warm.run([*command, "rollout.timeout=2"], capture_output=True, text=True)
    told = [line for line in done.stderr.splitlines() if line.startswith("isoloss: error: ")]
    assert done.returncode == 2 and len(told) == 1 and "Traceback" not in done.stderr
    assert "http://127.0.0.1:" in told[0] and "rollout.timeout=2" in told[0]
