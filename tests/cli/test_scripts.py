"""The scripts of recipes/scripts, run whole, with stand-ins for a cluster's commands that record how they are called.

What is expected is worked out by hand from the nodes of the job.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.runs.waiting import until

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "recipes" / "scripts"
WAIT = 60  # seconds that say that something hangs: what is waited for takes a tenth of one
STAND_INS = ("scontrol", "scancel", "srun", "torchrun", "python")
WATCHED = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
)  # fmt: skip

# By its name: scontrol tells the nodes of a job; srun runs its command in a session of its own, as on another node, and
# ends it when it is told to end; torchrun trains until all SERVERS are there; python serves until it is killed, but for
# the server on the GPUs that DIES names, once all are there, and after TIMES deaths of it no more.
STAND_IN = f"""#!{sys.executable} -IS
import json, os, signal, subprocess, sys, time
name, record = os.path.basename(sys.argv[0]), os.environ["RECORD"]
call = {{"name": name, "folder": os.path.dirname(sys.argv[0]), "arguments": sys.argv[1:], "pid": os.getpid()}}
watched = (signal.SIGTERM, signal.SIGUSR1)
call["ignores"] = [each.name for each in watched if signal.getsignal(each) == signal.SIG_IGN]
call["environment"] = {{key: os.environ[key] for key in {WATCHED!r} if key in os.environ}}
with open(record, "a") as file:
    file.write(json.dumps(call) + "\\n")
def wait_for_the_servers():
    deadline = time.monotonic() + {WAIT}
    while open(record).read().count('"name": "python"') < int(os.environ.get("SERVERS", 0)):
        if time.monotonic() > deadline:
            sys.exit("the servers did not start")
        time.sleep(0.02)
if name == "scontrol":
    print(*os.environ["NODES_OF_JOB"].split(), sep="\\n")
elif name == "srun":
    script = next(index for index, argument in enumerate(sys.argv) if argument.endswith(".sh"))
    task = subprocess.Popen(sys.argv[script:], start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: task.terminate())
    status = task.wait()
    sys.exit(status if status >= 0 else 128 - status)
elif name == "torchrun":
    wait_for_the_servers()
    while os.environ.get("UNTIL", "") not in open(record).read():
        time.sleep(0.02)
    if "UNTIL" in os.environ:
        time.sleep(0.5)
        with open(record, "a") as file:
            file.write(json.dumps({{**call, "name": "ended", "arguments": []}}) + "\\n")
    sys.exit(int(os.environ.get("STATUS", 0)))
elif name == "python":
    lives = [json.loads(line)["environment"].get("CUDA_VISIBLE_DEVICES") for line in open(record)]
    dies = os.environ.get("DIES")
    if dies == os.environ["CUDA_VISIBLE_DEVICES"] and lives.count(dies) <= int(os.environ.get("TIMES", 99)):
        wait_for_the_servers()
        sys.exit(3)
    time.sleep({WAIT})
"""


@dataclass(frozen=True)
class Call:
    """One call of a stand-in. environment: what it was given of the variables WATCHED. ignores: signals."""

    name: str
    folder: str
    arguments: list[str]
    pid: int
    environment: dict[str, str]
    ignores: list[str]


@dataclass(frozen=True)
class Done:
    status: int
    said: str
    calls: list[Call]

    def of(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    def line(self, name: str) -> str:
        """The command line of the only call of it."""
        (call,) = self.of(name)
        return " ".join([name, *call.arguments])


@pytest.fixture
def run(tmp_path) -> Iterator[Callable[..., Done]]:
    """run(script, *arguments, told=signal, once=(name, count), **environment) in the root of the checkout; what the
    stand-ins were called with. told: the signal that the script gets once it trains, or once `name` was called so many
    times."""
    folder, record = tmp_path / "bin", tmp_path / "record"
    folder.mkdir()
    for name in STAND_INS:
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(0o755)
    started = []

    def calls() -> list[Call]:
        return [Call(**json.loads(line)) for line in record.read_text().splitlines()] if record.exists() else []

    def run(
        script: str,
        *arguments: str,
        told: signal.Signals | None = None,
        once: tuple[str, int] = ("torchrun", 1),
        **variables: str,
    ) -> Done:
        # Nothing of ours but PATH: a script that needs a variable must be given it, or make it.
        environment = {"PATH": f"{folder}:/usr/bin:/bin", "RECORD": str(record), **variables}
        process = subprocess.Popen(
            ["bash", str(SCRIPTS / script), *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # serve.sh ends its whole process group
        )
        started.append(process.pid)
        if told:
            name, count = once
            until(lambda: sum(call.name == name for call in calls()) >= count, f"{name} was called {count} times")
            process.send_signal(told)
        said, _ = process.communicate(timeout=WAIT)
        return Done(process.returncode, said, calls())

    yield run
    for pid in [*started, *(call.pid for call in calls())]:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def ended(calls: list[Call]) -> bool:
    """Whether these processes end by themselves."""
    return until(lambda: not any(map(runs, [call.pid for call in calls])), "the servers had ended")


def runs(pid: int) -> bool:
    """A process that has ended stays a zombie until whoever inherited it looks after it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.iterdir()))
def test_the_shell_reads_it(script):
    done = subprocess.run(["bash", "-n", str(SCRIPTS / script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    sourced = script.endswith(".slurm") or script == "requeue.sh"
    assert os.access(SCRIPTS / script, os.X_OK) or sourced  # srun runs the others by their name


# ---- multi_node.sh --------------------------------------------------------------------------------------------------

OF_A_NODE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # what else training needs it sets itself


def test_one_agent_a_node(run):
    done = run("multi_node.sh", "sft", "preset=32b_h100", "model.path=a folder", HEAD="node0", NODES="2")
    assert done.status == 0, done.said
    assert done.line("torchrun") == (
        "torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint node0:29500 --rdzv_id isoloss "
        "--max_restarts 0 -m isoloss.recipes.sft preset=32b_h100 model.path=a folder"
    )
    (call,) = done.calls
    assert call.arguments[-2:] == ["preset=32b_h100", "model.path=a folder"]
    assert call.environment == OF_A_NODE


def test_what_can_be_set_of_an_agent(run):
    options = {"HEAD": "h", "NODES": "3", "GPUS": "4", "PORT": "1234", "JOB": "77", "RESTARTS": "5", "STATUS": "9"}
    done = run("multi_node.sh", "grpo", **options)
    assert done.status == 9  # torchrun's
    assert done.line("torchrun") == (
        "torchrun --nnodes 3 --nproc_per_node 4 --rdzv_backend c10d --rdzv_endpoint h:1234 --rdzv_id 77 "
        "--max_restarts 5 -m isoloss.recipes.grpo"
    )


@pytest.mark.parametrize(
    ("arguments", "variables", "says"),
    [
        (["sft"], {"NODES": "2"}, "set HEAD to the host name of one node"),
        (["sft"], {"HEAD": "node0"}, "set NODES to the number of nodes"),
        ([], {"HEAD": "node0", "NODES": "2"}, "usage: multi_node.sh RECIPE"),
    ],
)
def test_what_an_agent_must_be_told(run, arguments, variables, says):
    done = run("multi_node.sh", *arguments, **variables)
    assert done.status != 0 and says in done.said and done.calls == []


# ---- sft.slurm ------------------------------------------------------------------------------------------------------


def directives(script: str) -> set[str]:
    lines = (SCRIPTS / script).read_text().splitlines()
    return {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}


@pytest.mark.parametrize("script", ["sft.slurm", "rl.slurm"])
def test_what_a_job_asks_for(script):
    """One task a node, for torchrun starts the ranks, and all GPUs of it."""
    assert directives(script) >= {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--exclusive"}
    assert directives(script) >= {"--requeue", "--signal=B:USR1@300"}


def test_an_sft_job(run):
    job = {"SLURM_JOB_NODELIST": "n[7-9]", "SLURM_NNODES": "3", "SLURM_JOB_ID": "42", "NODES_OF_JOB": "n7 n8 n9"}
    done = run("sft.slurm", "preset=32b_h100", "data.train=a b", **job)
    assert done.status == 0, done.said
    assert done.line("scontrol") == "scontrol show hostnames n[7-9]"
    (srun,) = done.of("srun")
    keys = ["checkpoint.resume=true", "preset=32b_h100", "data.train=a b"]
    assert srun.arguments == ["recipes/scripts/multi_node.sh", "sft", *keys]
    assert done.line("torchrun") == (
        "torchrun --nnodes 3 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint n7:29500 --rdzv_id 42 "
        "--max_restarts 0 -m isoloss.recipes.sft checkpoint.resume=true preset=32b_h100 data.train=a b"
    )


def test_a_job_whose_time_ends_saves_and_is_queued_again(run):
    """Its ranks are told, and it is queued only once they have ended. torchrun does not end by the signal, which Slurm
    sends to every process of a step: its ranks, which handle it, end it."""
    job = {"SLURM_JOB_NODELIST": "n7", "SLURM_NNODES": "1", "SLURM_JOB_ID": "42", "NODES_OF_JOB": "n7"}
    done = run("sft.slurm", **job, UNTIL="scancel", STATUS="1", told=signal.SIGUSR1)
    names = [(call.name, *call.arguments[:2]) for call in done.calls if call.name in ("scancel", "scontrol", "ended")]
    assert names == [
        ("scontrol", "show", "hostnames"),
        ("scancel", "--signal=USR1", "42"),
        ("ended",),
        ("scontrol", "requeue", "42"),
    ]
    (torchrun,) = done.of("torchrun")
    assert torchrun.ignores == ["SIGUSR1"]


def test_servers_stay_while_the_trainer_saves(run):
    done = run("serve.sh", "a model", GPUS="1", SERVERS="1", DIES="0", RESTARTS="0")
    assert done.of("python")[0].ignores == ["SIGUSR1"]


def test_the_ranks_of_a_job_in_a_container(run):
    job = {"SLURM_JOB_NODELIST": "n7", "SLURM_NNODES": "1", "SLURM_JOB_ID": "42", "NODES_OF_JOB": "n7"}
    options = "--container-image=/images/trainer.sqsh --container-mounts=/data:/data"
    (srun,) = run("sft.slurm", "preset=tiny", **job, SRUN_OPTIONS=options).of("srun")
    ranks = ["recipes/scripts/multi_node.sh", "sft", "checkpoint.resume=true", "preset=tiny"]
    assert srun.arguments == [*options.split(), *ranks]


def test_a_job_has_the_status_of_its_training(run):
    job = {"SLURM_JOB_NODELIST": "n7", "SLURM_NNODES": "1", "SLURM_JOB_ID": "42", "NODES_OF_JOB": "n7"}
    assert run("sft.slurm", **job, STATUS="1").status == 1


# ---- serve.sh -------------------------------------------------------------------------------------------------------


def served(done: Done) -> list[tuple[str, str]]:
    """(CUDA_VISIBLE_DEVICES, command line) of every server, in the order of their GPUs."""
    calls = done.of("python")
    return sorted((call.environment["CUDA_VISIBLE_DEVICES"], " ".join(call.arguments)) for call in calls)


def line_of_a_server(tp: int, port: int, more: str, host: str = "0.0.0.0") -> str:
    return f"-m sglang.launch_server --model-path a model --tp {tp} --host {host} --port {port}{more}"


def test_servers_of_a_node(run):
    """One that is given up ends the others and the script. Each has its own two GPUs: none serves the seventh."""
    options = {"TP": "2", "GPUS": "7", "PORT": "7000", "SERVERS": "3", "DIES": "2,3", "RESTARTS": "0"}
    done = run("serve.sh", "a model", "--load-format", "dummy", **options)
    assert done.status == 3, done.said  # the dead one's
    more = " --load-format dummy"
    assert served(done) == [
        ("0,1", line_of_a_server(2, 7000, more)),
        ("2,3", line_of_a_server(2, 7001, more)),
        ("4,5", line_of_a_server(2, 7002, more)),
    ]
    assert ended(done.of("python"))


def test_a_server_for_every_gpu(run):
    done = run("serve.sh", "a model", SERVERS="8", DIES="7", RESTARTS="0")
    assert done.status == 3, done.said
    assert served(done) == [(str(gpu), line_of_a_server(1, 30000 + gpu, "")) for gpu in range(8)]


TWO = {"GPUS": "2", "SERVERS": "2", "DIES": "1"}


def test_servers_at_an_address_that_ask_for_a_key(run, tmp_path):
    """The key itself is in no command line, which every user of the machine may read."""
    key = tmp_path / "a key.yaml"
    key.touch(mode=0o600)
    key.write_text("api-key: secret")
    more = {"GPUS": "1", "SERVERS": "1", "DIES": "0", "RESTARTS": "0"}
    done = run("serve.sh", "a model", "--x", ADDRESS="127.0.0.1", KEY_FILE=str(key), **more)
    assert served(done) == [("0", line_of_a_server(1, 30000, f" --config {key} --x", "127.0.0.1"))]
    assert done.status == 3 and "secret" not in done.said


@pytest.mark.parametrize("mode", (None, 0o644, 0o640, 0o604))
def test_a_key_file_is_of_its_owner_alone(mode, run, tmp_path):
    key = tmp_path / "key.yaml"
    if mode is not None:
        key.write_text("api-key: secret")
        key.chmod(mode)
    done = run("serve.sh", "a model", GPUS="1", KEY_FILE=str(key))
    assert done.status == 2 and served(done) == []
    assert f"serve.sh: KEY_FILE={key} must be a file that you alone can read: make it, and chmod 600 it" in done.said


def told_by(done: Done) -> list[str]:
    return [line for line in done.said.splitlines() if line.startswith("serve.sh: ")]


def test_a_server_that_dies_is_started_again_and_the_other_lives_on(run):
    """With the same words; SIGTERM, which srun sends, then ends the script and both."""
    done = run("serve.sh", "a model", "--x", **TWO, TIMES="1", PAUSE="1", told=signal.SIGTERM, once=("python", 3))
    more = line_of_a_server(1, 30001, " --x")
    assert served(done) == [("0", line_of_a_server(1, 30000, " --x")), ("1", more), ("1", more)]
    assert told_by(done) == ["serve.sh: the server on port 30001 ended with status 3: restart 1 of 5 in 1 s"]
    assert done.status == -signal.SIGTERM, done.said
    assert ended(done.of("python"))


def test_a_server_that_cannot_start_ends_them_all_in_one_line(run):
    """Not at once, and not never: each pause is twice the one before."""
    began = time.monotonic()
    done = run("serve.sh", "a model", **TWO, RESTARTS="2", PAUSE="1")
    assert time.monotonic() - began >= 1 + 2 and done.status == 3
    assert len(done.of("python")) == 1 + 3
    *restarts, last = told_by(done)
    assert [line.rpartition(": ")[2] for line in restarts] == ["restart 1 of 2 in 1 s", "restart 2 of 2 in 2 s"]
    assert last.startswith("serve.sh: the server on port 30001 ended with status 3 and was restarted 2 times")
    assert "giving up" in last and ended(done.of("python"))


def test_deaths_with_a_life_between_them_do_not_add_up(run):
    """Here any life counts as long."""
    given = {**TWO, "RESTARTS": "1", "PAUSE": "0", "SETTLED": "0"}
    done = run("serve.sh", "a model", **given, told=signal.SIGTERM, once=("python", 6))
    assert len(told_by(done)) >= 4 and all(line.endswith("restart 1 of 1 in 0 s") for line in told_by(done))
    assert ended(done.of("python"))


# ---- rl.slurm -------------------------------------------------------------------------------------------------------


def test_a_reinforcement_learning_job(run, tmp_path):
    """Four nodes, of which two train: the addresses that the trainer is told are those that the others serve at."""
    sglang = tmp_path / "sglang"
    shutil.copytree(tmp_path / "bin", sglang)
    job = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_NNODES": "4", "SLURM_JOB_ID": "42", "NODES_OF_JOB": "n1 n2 n3 n4"}
    wanted = {"MODEL": "a model", "TRAIN_NODES": "2", "TP": "4", "SGLANG_PYTHON": str(sglang), "SERVERS": "2"}
    done = run("rl.slurm", "dapo", "preset=8b_h100", "rollout.timeout=60", **job, **wanted)
    assert done.status == 0, done.said
    assert done.line("scontrol") == "scontrol show hostnames n[1-4]"

    by_nodes = {call.arguments[3]: call for call in done.of("srun")}
    serving, training = by_nodes["n3,n4"], by_nodes["n1,n2"]
    assert serving.arguments == [
        *("--nodes", "2", "--nodelist", "n3,n4", "recipes/scripts/serve.sh", "a model", "--load-format", "dummy")
    ]
    assert training.arguments[:4] == ["--nodes", "2", "--nodelist", "n1,n2"]
    servers = "http://n3:30000,http://n3:30001,http://n4:30000,http://n4:30001"
    assert done.line("torchrun") == (
        "torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint n1:29500 --rdzv_id 42 "
        f"--max_restarts 0 -m isoloss.recipes.dapo model.path=a model rollout.servers=[{servers}] "
        "checkpoint.resume=true preset=8b_h100 rollout.timeout=60"  # the user's, which may stand only once
    )
    more = " --load-format dummy"
    assert served(done) == [  # of one of the two nodes: this srun has one
        ("0,1,2,3", line_of_a_server(4, 30000, more)),
        ("4,5,6,7", line_of_a_server(4, 30001, more)),
    ]
    # SGLang's environment is the servers' alone.
    assert {call.folder for call in done.of("python")} == {str(sglang)}
    assert {call.folder for call in done.of("torchrun")} == {str(tmp_path / "bin")}
    assert ended(done.of("python"))  # the servers end with the training


def test_one_node_trains_and_one_serves(run):
    job = {"SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_ID": "1", "NODES_OF_JOB": "a b", "MODEL": "m", "SERVERS": "8"}
    done = run("rl.slurm", "grpo", **job)
    assert done.status == 0, done.said
    assert sorted(call.arguments[3] for call in done.of("srun")) == ["a", "b"]
    servers = ",".join(f"http://b:{port}" for port in range(30000, 30008))
    assert done.line("torchrun").startswith("torchrun --nnodes 1 ") and "--rdzv_endpoint a:29500" in done.line(
        "torchrun"
    )
    assert f" model.path=m rollout.servers=[{servers}] rollout.timeout=1800" in done.line("torchrun")


def test_ranks_and_servers_in_containers_of_their_own(run):
    job = {"SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_ID": "1", "NODES_OF_JOB": "a b", "MODEL": "m", "SERVERS": "8"}
    images = {"TRAIN_OPTIONS": "--container-image=t --container-writable", "SERVE_OPTIONS": "--container-image=s"}
    done = run("rl.slurm", "grpo", **job, **images)
    assert done.status == 0, done.said
    words = {call.arguments[3]: call.arguments[4:7] for call in done.of("srun")}
    assert words["a"] == ["--container-image=t", "--container-writable", "recipes/scripts/multi_node.sh"]
    assert words["b"] == ["--container-image=s", "recipes/scripts/serve.sh", "m"]


@pytest.mark.parametrize("variables", [{"TRAIN_NODES": "2"}, {"TP": "16"}])
def test_a_job_without_a_server_is_refused(run, variables):
    job = {"SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_ID": "1", "NODES_OF_JOB": "a b", "MODEL": "m"}
    done = run("rl.slurm", "grpo", **job, **variables)
    assert done.status == 2 and "leave no server; set them lower" in done.said
    assert [call.name for call in done.calls] == ["scontrol"]


@pytest.mark.parametrize(
    ("arguments", "variables", "says"),
    [(["grpo"], {}, "set MODEL to the Hugging Face folder"), ([], {"MODEL": "m"}, "usage: rl.slurm RECIPE")],
)
def test_what_a_job_must_be_told(run, arguments, variables, says):
    done = run("rl.slurm", *arguments, **variables, SLURM_JOB_NODELIST="a", SLURM_JOB_ID="1", NODES_OF_JOB="a b")
    assert done.status != 0 and says in done.said and done.calls == []
