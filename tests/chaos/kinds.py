"""The kinds of runs that are disturbed, each with a model so small that a start takes most of its time."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from chaos.job import Kind
from support.runs import rl_runs
from support.runs.ports import free_port
from support.runs.runs import write_rows
from support.servers.server_commands import SGLANG
from transformers import AutoConfig, AutoModelForCausalLM

TEXTS = [f"{n} and {n} is {n + n}." + " So it is." * (n % 5) for n in range(12)]
RL_FILES = ("metrics.jsonl", "rollouts.jsonl", "eval.jsonl", "eval_rollouts.jsonl")
DOUBLES = Path(__file__).parents[1] / "doubles"
SHARED = ("optim.lr=1e-2", "optim.schedule=constant", "checkpoint.every=1", "checkpoint.export_hf=true")


def write_inputs(folder: Path) -> Path:
    folder.mkdir(parents=True)
    rl_runs.write_inputs(folder)
    write_rows(folder / "texts.jsonl", [{"text": text} for text in TEXTS])
    shutil.copytree(folder / "model", folder / "start")  # with weights, which servers want
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")).save_pretrained(folder / "start")
    shutil.copy(folder / "model" / "generation_config.json", folder / "start")
    return folder


def sft(inputs: Path) -> Kind:
    """Two ranks under torchrun, which starts them again; saved after every step, beside training."""
    keys = (
        f"model.path={inputs}/model", "model.from_scratch=true", f"data.train={inputs}/texts.jsonl",
        f"data.eval={inputs}/texts.jsonl", "data.max_length=128", "batch.global_size=5", "batch.max_tokens=64",
        "train.eval_every=1", *SHARED,
    )  # fmt: skip
    return Kind("SFT, two ranks", "sft", "sft", keys, ("metrics.jsonl", "eval.jsonl"), ranks=2)


def grpo(inputs: Path) -> Kind:
    """Two optimizer steps a batch: a checkpoint between them holds the rest of the batch."""
    return Kind("GRPO in process", "grpo", "grpo", _grpo_keys(inputs), RL_FILES)


def servers(inputs: Path) -> Kind:
    """The same on two servers that the run starts, each behind a network that can be cut."""
    ports = free_port(), free_port()
    urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
    networks = tuple(inputs / f"network-{port}" for port in ports)
    for folder in networks:
        folder.mkdir(exist_ok=True)
    double = f"{DOUBLES}/sglang_server.py --model {{model}} --port {{{{port}}}} --deterministic"
    command = f"{DOUBLES}/partition.py {inputs}/network-{{port}} {{host}} {{port}} {sys.executable} {double}"
    keys = _server_keys(inputs, urls, f"{sys.executable} {command}", 60)
    return Kind(
        "GRPO, two servers", "servers", "grpo", keys, RL_FILES, urls=urls, networks=networks, server="sglang_server.py"
    )


def ahead(inputs: Path) -> Kind:
    """The same, a batch ahead of the trainer. Which weights make a token depends on what has to be done besides."""
    kind = servers(inputs)
    keys = (*kind.keys, "rollout.max_staleness=1", "algorithm.importance=token")
    return replace(
        kind, name="GRPO, ahead", moments="ahead", keys=keys, files=(), exact=False, max_staleness=1, batch_steps=2
    )


def sglang(inputs: Path) -> Kind:
    """The same on a real SGLang server that the run starts. What it samples depends on what it has to do besides."""
    urls = (f"http://127.0.0.1:{free_port()}",)
    keys = _server_keys(inputs, urls, SGLANG, 300)
    return Kind("GRPO, SGLang", "servers", "grpo", keys, (), urls=urls, exact=False, server="sglang.launch_server")


def _server_keys(inputs: Path, urls: Sequence[str], command: str, timeout: int) -> tuple[str, ...]:
    """Of GRPO on servers that the run starts with this command."""
    own = (
        "rollout.backend=sglang", f"rollout.servers=[{','.join(urls)}]", "rollout.weight_sync=tensor",
        f"rollout.server_command='{command}'", f"rollout.timeout={timeout}",
        f"model.path={inputs}/start", "model.from_scratch=false",
    )  # fmt: skip
    return (*_grpo_keys(inputs), *own)


def _grpo_keys(inputs: Path) -> tuple[str, ...]:
    own = [key for key in rl_runs.overrides_of(inputs, "") if not key.startswith(("train.steps", "output_dir"))]
    return (*own, "algorithm.minibatches=2", f"data.eval={inputs}/prompts.jsonl", "train.eval_every=1", *SHARED)
