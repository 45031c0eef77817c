"""Every command of a page that is marked `dry run` is run as far as that goes without a cluster.

The shell and recipes/scripts are real. Other programs are docs/stand_in.py, which records how they are called. Here
the calls are checked: what a command uses was made by one before it, versions are those of the table, tools and recipes
take their arguments, and the run that would start fits the published config.json on the GPUs that it asks for.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from support.models.published import QWEN3_8B, QWEN3_30B_A3B
from support.plans import dockerfile
from torch.distributed.run import get_args_parser

from isoloss.engine.config import rules
from isoloss.engine.config.schema import Config
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.reward.rewarder import located
from isoloss.models.families.registry import read_architecture
from isoloss.parallel.runtime import versions
from isoloss.recipes.launch import RECIPES, compose_config
from isoloss.tools.convert import __main__ as convert
from isoloss.tools.doctor import __main__ as doctor
from isoloss.tools.plan import __main__ as plan

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests/docs/stand_in.py"
PAGE = ROOT / "docs/cluster.md"
BLOCK = re.compile(r"^<!-- dry run: .+? -->\n```sh\n((?:.*\n)*?)^```$", re.M)
CONFIGS = {"Qwen3-8B": QWEN3_8B, "Qwen3-30B-A3B": QWEN3_30B_A3B}
OWN_ROWS = "/shared/data/train.jsonl"  # what a reader brings
DATA_SETS = {  # of the hub, and their file
    "BytedTsinghua-SIA/DAPO-Math-17k": "data/dapo-math-17k.parquet",
    "BytedTsinghua-SIA/AIME-2024": "data/aime-2024.parquet",
}
WRITTEN_BY_A_RUN = ("metrics.jsonl", "eval.jsonl")
# Of sglang.launch_server, those that the page and serve.sh use (SGLang 0.5.23, server_args.py).
SERVER_OPTIONS = ("--model-path", "--tp", "--host", "--port", "--load-format", "--mem-fraction-static")
SERVER_FLAGS = ("--enable-memory-saver", "--enable-weights-cpu-backup")


class Parser(argparse.ArgumentParser):
    """Of a program that is not ours: a mistake is a failure of the test."""

    def __init__(self, prog: str, *options: str, flags: Sequence[str] = (), words: str = "*"):
        super().__init__(prog=prog, allow_abbrev=False, add_help=False)
        for option in options:
            self.add_argument(option, action="append", default=[])
        for flag in flags:
            self.add_argument(flag, action="store_true")
        self.add_argument("words", nargs=words)

    def error(self, message: str):
        raise AssertionError(f"{self.prog}: {message}")


@dataclass(frozen=True)
class Call:
    name: str
    arguments: list[str]
    pid: int
    image: str | None
    gpus: str | None
    options: dict[str, Any] = field(default_factory=dict)
    train: bool = False


@dataclass
class Cluster:
    """What the commands so far have made. stages: of the image that a name or a file has. runs: (recipe, model, GPUs)
    and the configuration, of those planned and of those launched."""

    folder: Path
    stages: dict[str, str] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    data: set[str] = field(default_factory=lambda: {OWN_ROWS})
    planned: list[tuple[tuple[str, str, int], Config]] = field(default_factory=list)
    launched: list[tuple[tuple[str, str, int], Config]] = field(default_factory=list)

    def check(self, call: Call) -> None:
        checks: dict[str, Callable[[Call], None]] = {
            "docker": self.docker, "enroot": self.enroot, "hf": self.hf, "pip": self.pip, "python": self.python,
            "python3": self.python3, "sbatch": self.job, "srun": self.job, "tail": self.tail,
            "tensorboard": self.tensorboard, "torchrun": self.torchrun, "scontrol": lambda call: None,
        }  # fmt: skip
        checks[call.name](call)

    def docker(self, call: Call) -> None:
        verb, *rest = call.arguments
        if verb == "build":
            told = Parser("docker build", "-f", "--target", "-t").parse_args(rest)
            instructions = dockerfile.read(ROOT / told.f[0])
            assert told.target[0] in dockerfile.parents(instructions) and told.words == ["."], rest
            self.stages[told.t[0]] = told.target[0]
            return
        assert verb == "run", call.arguments
        flags = ("--rm", "-it")
        told = Parser("docker run", "--gpus", "--network", "--ipc", "--ulimit", "-v", flags=flags).parse_args(rest)
        assert told.words == ["isoloss-node", "bash"] and told.words[0] in self.stages
        assert (told.gpus, told.network, told.ipc) == (["all"], ["host"], ["host"])

    def enroot(self, call: Call) -> None:
        verb, *rest = call.arguments
        parsers = {
            "import": Parser("enroot import", "-o"),
            "create": Parser("enroot create", "--name"),
            "start": Parser("enroot start", "--mount", flags=["--rw"]),
        }
        told = parsers[verb].parse_args(rest)
        if verb == "import":
            scheme, _, tag = told.words[0].partition("://")
            assert scheme == "dockerd" and told.o[0].endswith(".sqsh")
            self.stages[told.o[0]] = self.stages[tag]
        elif verb == "create":
            self.stages[told.name[0]] = self.stages[told.words[0]]
        else:
            assert told.words == ["isoloss-node", "bash"] and told.words[0] in self.stages

    def job(self, call: Call) -> None:
        """What srun and sbatch do not know, the stand-in refuses."""
        if image := call.options.get("container_image"):
            assert call.options["container_mounts"] == "/shared:/shared" and image in self.stages, call.arguments
            assert call.options["container_workdir"] == "/opt/isoloss"  # where the Dockerfile copies to
        assert (ROOT / call.options["command"][0]).is_file() or call.options["command"][0] in ("bash", "python")

    def hf(self, call: Call) -> None:
        verb, *rest = call.arguments
        assert verb == "download"
        told = Parser("hf download", "--local-dir", "--repo-type").parse_args(rest)
        repository, *files = told.words
        if told.repo_type:
            assert told.repo_type == ["dataset"] and files == [DATA_SETS[repository]]
            self.data.add(f"{told.local_dir[0]}/{files[0]}")
            return
        name = repository.removeprefix("Qwen/")
        assert name in CONFIGS and not files and told.local_dir == [f"/shared/models/{name}"], rest
        self.models.add(told.local_dir[0])
        folder = self.folder / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIGS[name]))

    def pip(self, call: Call) -> None:
        verb, *rest = call.arguments
        told = Parser("pip install", "-c", "-e", flags=["--no-build-isolation"]).parse_args(rest)
        assert verb == "install" and all((ROOT / file).is_file() for file in told.c)
        assert told.e in ([], [".[gpu]"]) and bool(told.e) == told.no_build_isolation
        made = versions.set_of_images()
        for requirement in map(Requirement, told.words):
            pinned = {"torch": f"=={made.torch}", "sglang": f"=={made.sglang}"}.get(requirement.name)
            assert pinned in (None, str(requirement.specifier)), requirement
            assert pinned or requirement.name in ("setuptools", "wheel", "ninja")
        assert any(word.startswith("torch==") for word in told.words), "torch would be the newest"

    def python3(self, call: Call) -> None:
        assert call.arguments[:2] == ["-m", "venv"] and len(call.arguments) == 3

    def python(self, call: Call) -> None:
        flag, module, *rest = call.arguments
        assert flag == "-m"
        if module == "sglang.launch_server":
            told = Parser(module, *SERVER_OPTIONS, flags=SERVER_FLAGS).parse_args(rest)
            assert told.model_path[0] in self.models and not told.words
            assert call.image is None or self.stages[call.image] == "server"
            assert call.gpus is not None and len(call.gpus.split(",")) == int(told.tp[0])
            return
        assert call.image is None or self.stages[call.image] == "trainer"
        tools = {"doctor": self.doctor, "plan": self.plan, "convert": self.convert, "reward_curve": self.reward_curve}
        tools[module.removeprefix("isoloss.tools.")](rest)

    def doctor(self, arguments: list[str]) -> None:
        told = doctor._parser().parse_args(arguments)
        known = {url for _, config in self.launched if isinstance(config, RLConfig) for url in config.rollout.servers}
        assert set(told.servers) <= known, arguments

    def plan(self, arguments: list[str]) -> None:
        told = plan.parser().parse_intermixed_args(arguments)
        self.planned.append(self.composed(told.recipe, told.overrides, told.gpus))

    def convert(self, arguments: list[str]) -> None:
        told = convert._parser().parse_args(arguments)
        assert str(told.checkpoint.parents[1]) in self.folders_of_runs(), arguments
        self.models.add(str(told.out))

    def reward_curve(self, arguments: list[str]) -> None:
        (run,) = arguments
        assert any(config.output_dir == run and config.data.eval for _, config in self.launched), arguments

    def tail(self, call: Call) -> None:
        *options, file = call.arguments
        assert options == ["-n", "2"] and str(Path(file).parent) in self.folders_of_runs()
        assert Path(file).name in WRITTEN_BY_A_RUN, file

    def tensorboard(self, call: Call) -> None:
        told = Parser("tensorboard", "--logdir", "--port").parse_args(call.arguments)
        assert all(folder.startswith(told.logdir[0]) for folder in self.folders_of_runs())

    def torchrun(self, call: Call) -> None:
        assert call.train and (call.image is None or self.stages[call.image] == "trainer")
        told = get_args_parser().parse_args(call.arguments)
        assert told.module and told.training_script.startswith("isoloss.recipes.")
        per_node = int(told.nproc_per_node)
        assert call.gpus is None or len(call.gpus.split(",")) == per_node
        recipe = told.training_script.removeprefix("isoloss.recipes.")
        run = self.composed(recipe, told.training_script_args, int(told.nnodes) * per_node)
        config = run[1]
        assert {*config.data.train, *config.data.eval} <= self.data and config.output_dir is not None
        if isinstance(config, RLConfig):
            assert config.rollout.weight_sync in versions.set_of_images().weight_syncs
            assert all(map(located, config.reward.function))
        self.launched.append(run)

    def composed(self, recipe: str, overrides: Sequence[str], gpus: int) -> tuple[tuple[str, str, int], Config]:
        """Checked as a run checks it: keys, their values, and the layout for the model on so many GPUs."""
        (model,) = [each.removeprefix("model.path=") for each in overrides if each.startswith("model.path=")]
        assert model in self.models, model
        folder = self.folder / Path(model).name
        given = [f"model.path={folder}" if each.startswith("model.path=") else each for each in overrides]
        config = compose_config(recipe, RECIPES[recipe].config, given)[0]
        arch = read_architecture(folder)
        rules.check(config, arch, config.parallel.layout().with_world(gpus))
        assert config.data.max_length <= min(arch.max_positions, config.batch.max_tokens)
        return (recipe, Path(model).name, gpus), config

    def folders_of_runs(self) -> set[str | None]:
        return {config.output_dir for _, config in self.launched}


def shell_of(page: Path) -> str:
    """Its marked blocks, one after the other, as in one interactive shell."""
    return "set -emuo pipefail\n" + "\n".join(BLOCK.findall(page.read_text()))


def calls_of(script: str, folder: Path) -> list[Call]:
    """What the programs of a script were called with, in order. Fails where its shell does."""
    work, programs, record = folder / "work", folder / "bin", folder / "record"
    work.mkdir()
    programs.mkdir()
    for name in ("recipes", "constraints.txt"):
        (work / name).symlink_to(ROOT / name)
    text = f"#!{sys.executable} -IS\n" + STAND_IN.read_text()
    names = re.search(r"^NAMES = \((.*?)\)", text, re.M | re.S)
    assert names is not None
    for name in re.findall(r'"(\w+)"', names[1]):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(work), "RECORD": str(record)}
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(["bash", "-c", script], cwd=work, env=environment, stdout=said, stderr=said,
                                   start_new_session=True)  # fmt: skip
        try:
            status = process.wait(timeout=120)
        finally:
            calls = [Call(**json.loads(line)) for line in record.read_text().splitlines()]
            for pid in {process.pid, *(call.pid for call in calls)}:
                for kill in (os.killpg, os.kill):
                    try:
                        kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
    assert status == 0, f"status {status} after {calls[-1] if calls else 'no call'}: {(folder / 'said').read_text()}"
    return calls


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Cluster:
    folder = tmp_path_factory.mktemp("cluster")
    cluster = Cluster(folder)
    for call in calls_of(shell_of(PAGE), folder):
        cluster.check(call)
    return cluster


def test_every_command_is_dry_run():
    """No block of the page is left out: each has the mark, and none is only shown."""
    text = PAGE.read_text()
    assert len(BLOCK.findall(text)) == text.count("```") // 2 >= 15


def test_what_the_page_launches(cluster):
    """Fine-tuning and GRPO of both models, on 8 and on 64 GPUs: those that train, and the servers of the others."""
    launched = {
        (*run, len(config.rollout.servers) if isinstance(config, RLConfig) else 0) for run, config in cluster.launched
    }
    assert launched == {
        ("sft", "Qwen3-8B", 8, 0),
        ("sft", "Qwen3-8B", 64, 0),
        ("sft", "Qwen3-30B-A3B", 8, 0),
        ("sft", "Qwen3-30B-A3B", 64, 0),
        ("grpo", "Qwen3-8B", 4, 4),
        ("grpo", "Qwen3-8B", 32, 32),
        ("grpo", "Qwen3-30B-A3B", 8, 1),
        ("grpo", "Qwen3-30B-A3B", 32, 16),
    }


def test_what_is_launched_was_planned(cluster):
    """With the same keys: a plan of another run says nothing."""

    def sized(config: Config) -> tuple:
        return config.parallel, config.memory, config.batch, config.data.max_length

    plans = {run: sized(config) for run, config in cluster.planned}
    assert len(plans) == len(cluster.planned)
    assert plans == {run: sized(config) for run, config in cluster.launched}


def test_reinforcement_learning_takes_each_question_once(cluster):
    runs = [config for _, config in cluster.launched if isinstance(config, RLConfig)]
    assert {config.data.duplicates for config in runs} == {"drop"} and all(config.data.eval for config in runs)


def test_a_run_goes_on_with_the_keys_that_it_began_with(cluster):
    began = {}
    again = [each for each in cluster.launched if began.setdefault(each[1].output_dir, each) is not each]
    assert len(again) == 1 and again[0][1].checkpoint.resume
    first = began[again[0][1].output_dir]
    assert first[0] == again[0][0] and first[1].batch == again[0][1].batch


@pytest.mark.parametrize(
    "line",
    [
        "dokcer build .",
        "srun --container-img=x bash",
        "sbatch --nodes=8 recipes/scripts/sfft.slurm preset=8b_h100",
        "HEAD=h NODES=1 recipes/scripts/multinode.sh sft",
        "NODES=1 recipes/scripts/multi_node.sh sft",
        "HEAD=h NODES=1 recipes/scripts/multi_node.sh grpo 'rollout.servers=[http://h:1]' & kill -9 %1; wait %1",
    ],
)
def test_what_the_shell_refuses(line, tmp_path):
    with pytest.raises(AssertionError, match="status"):
        calls_of(f"set -emuo pipefail\npython -m first\n{line}", tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "docker build -f recipes/containers/Dockerfile --target trainr -t x .",
        "docker build -f recipes/containers/Dockerfile --traget trainer -t x .",
        "enroot import -o x.sqsh dockerd://isoloss-trainer",
        "srun --container-image=x.sqsh --container-mounts=/shared:/shared --container-workdir=/opt/isoloss --pty bash",
        "hf download Qwen/Qwen3-8 --local-dir /shared/models/Qwen3-8",
        "pip install torch==2.13.0 sglang==0.5.23",
        "pip install --no-build-isolation -e '.[gpus]' torch==2.14.1",
        "python -m isoloss.tools.docter",
        "python -m isoloss.tools.doctor --output_dir x",
        "python -m isoloss.tools.doctor --servers http://n0:30000",
        "{hf}; python -m isoloss.tools.plan sft preset=8b_h10 model.path=/shared/models/Qwen3-8B --gpus 8",
        "{hf}; python -m isoloss.tools.plan sft preset=8b_h100 model.path=/shared/models/Qwen3-8B --gpu 8",
        "{hf}; python -m isoloss.tools.plan sft preset=8b_h100 model.path=/shared/models/Qwen3-8B --gpus 7",
        "{hf}; python -m isoloss.tools.plan sft model.path=/shared/models/Qwen3-8B parallel.ep=8 --gpus 8",
        "{hf}; {agent} sft model.path=/shared/models/Qwen3-8B data.trian=x",
        "{hf}; {agent} sft model.path=/shared/models/Qwen3-8B output_dir=o data.train=x.jsonl",
        "{hf}; {agent} stf model.path=/shared/models/Qwen3-8B",
        "tail -n 2 /shared/runs/sft/metrics.jsonl",
    ],
)
def test_what_the_checks_refuse(line, tmp_path):
    download = "hf download Qwen/Qwen3-8B --local-dir /shared/models/Qwen3-8B"
    script = line.replace("{hf}", download).replace("{agent}", "HEAD=h NODES=1 recipes/scripts/multi_node.sh")
    cluster = Cluster(tmp_path)
    with pytest.raises((Exception, SystemExit)) as refused:
        for call in calls_of(f"set -emuo pipefail\n{script}", tmp_path):
            cluster.check(call)
    assert "after" not in str(refused.value) or "status" not in str(refused.value), "the shell refused it"
