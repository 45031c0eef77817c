"""A job that is told to end, and one whose nodes go and come, under torchrun."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.runs import warm
from support.runs.ports import free_port
from support.runs.runs import rows_of
from support.runs.waiting import LONG, until

from isoloss.recipes import launch

TESTS = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


class Jobs:
    """Agents of torchrun, each in a session of its own, whose output goes to a file."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.agents: list[subprocess.Popen] = []

    def start(self, *words: str, popen: type[subprocess.Popen] = subprocess.Popen, **options) -> subprocess.Popen:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with open(self.folder / f"said {len(self.agents)}", "w") as said:
            agent = popen(
                [*TORCHRUN, *words], env=environment, stdout=said, stderr=said, start_new_session=True, **options
            )
        self.agents.append(agent)
        return agent

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("said *")))

    def kill(self, agent: subprocess.Popen) -> None:
        """The agent and its ranks, as if the node lost its power."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]:
                process.kill()
        agent.wait()


@pytest.fixture
def jobs(tmp_path) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path)
    yield jobs
    for agent in jobs.agents:
        jobs.kill(agent)
    print(jobs.said())  # shown where the test failed


def steps_of(out: Path) -> list[int]:
    """The steps that the metrics have now; the last line may be half written."""
    file = out / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda told: told.name)
def test_a_job_that_is_told_to_end_is_not_started_again(told, jobs, arguments, tmp_path):
    """SIGTERM to torchrun, which passes it on, and SIGINT, which a terminal sends to torchrun alone: its ranks are in
    sessions of their own; SIGUSR1 to every process, as Slurm sends it, of which the agent ignores
    it as multi_node.sh has it. Two ranks save what no checkpoint was due for; nothing is left running, and torchrun
    does not use its restarts."""
    argv = [*arguments, "train.steps=100000", f"output_dir={tmp_path}/out"]
    options = ["--standalone", "--nproc_per_node", "2", "--max_restarts", "3"]
    ignore = lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    how: dict = {"preexec_fn": ignore} if told == signal.SIGUSR1 else {"popen": warm.Popen}
    agent = jobs.start(*options, "-m", "cli.slow_steps", "0.1", *argv, **how)
    out = tmp_path / "out"
    until(lambda: len(steps_of(out)) >= 2, "two steps were done", lambda: agent.poll() is None)
    started = psutil.Process(agent.pid).children(recursive=True)
    assert len(started) >= 2
    if told == signal.SIGUSR1:
        for process in [psutil.Process(agent.pid), *started]:
            process.send_signal(told)
    else:
        agent.send_signal(told)
    assert agent.wait(LONG) != 0
    _, alive = psutil.wait_procs(started, LONG)
    assert alive == []
    last = steps_of(out)[-1]
    saved = f"told to end by {told.name}: saved {out}/checkpoints/step_{last:08d}; go on with checkpoint.resume=true"
    assert jobs.said().count(saved) == 1 and jobs.said().count("run: ") == 1, jobs.said()
    assert (
        jobs.said().count("isoloss: interrupted: ") == (told == signal.SIGINT)
        and "recipes/launch.py" not in jobs.said()
    )
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step_{last:08d}"]


@pytest.mark.slow
def test_a_job_goes_on_with_the_nodes_that_are_left_and_those_that_come_back(jobs, arguments, tmp_path):
    """Two nodes of two ranks; one is killed, one joins again: four ranks, two, four. Every step of the run has the loss
    and the gradient norm of one rank that nothing happened to, to fp64's rounding."""
    keys = [*arguments, "train.precision=fp64", "train.steps=90", "checkpoint.every=5", "optim.lr=1e-2"]
    assert launch.main("sft", [*keys, "output_dir=alone"]) == 0
    out, endpoint = tmp_path / "out", f"localhost:{free_port()}"
    argv = [*keys, f"output_dir={out}", "checkpoint.resume=true"]
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", "elastic"]
    words = ["--nnodes", "1:2", "--nproc_per_node", "2", "--max_restarts", "3", *rendezvous]
    conf = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=8,is_host="

    def node(is_host: bool = False) -> subprocess.Popen:
        """All agents are on this machine: which one holds the store of the rendezvous, and has to live, is said."""
        return jobs.start(*words, "--rdzv_conf", f"{conf}{is_host}", "-m", "cli.slow_steps", "0.4", *argv)

    first = node(is_host=True)
    alive = lambda: first.poll() is None
    second = node()
    until(lambda: "on 4 rank(s)" in jobs.said(), "four ranks trained", alive)
    begun = len(steps_of(out))
    until(lambda: len(steps_of(out)) >= begun + 8, "they had done a few steps", alive)
    jobs.kill(second)
    until(lambda: jobs.said().count("on 2 rank(s)") >= 1, "two ranks went on", alive)
    begun = len(steps_of(out))
    until(lambda: len(steps_of(out)) >= begun + 5, "they had done a few steps", alive)
    before = jobs.said().count("on 4 rank(s)")
    third = node()
    until(lambda: jobs.said().count("on 4 rank(s)") > before, "four ranks went on", alive)
    assert first.wait(LONG) == 0 and third.wait(LONG) == 0, jobs.said()
    assert jobs.said().count("told to end by SIGTERM: saved") >= 1  # two ranks, before four: no step is done twice
    found, wanted = rows_of(out / "metrics.jsonl"), rows_of(Path("alone/metrics.jsonl"))
    assert [row["step"] for row in found] == [row["step"] for row in wanted] == list(range(1, 91))
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in found] == pytest.approx([row[key] for row in wanted], rel=1e-9), key
    assert wanted[-1]["loss"] < 0.9 * wanted[0]["loss"]
