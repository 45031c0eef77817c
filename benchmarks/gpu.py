"""Steps on one GPU: how fast, how near the plan, what each kernel brings; and the phases of GRPO.

    python benchmarks/gpu.py [--out gpu.json] [--only step plan kernels rl] [--minutes 18] [--device cpu]

Layers have the shapes of Qwen3-8B and Qwen3-30B-A3B, and are as many as fit; weights are random, in bf16. Every figure
comes from a process of its own, and is written as soon as it is known; what no time is left for is named.

step: rows of 8k, 32k and 128k tokens, of one and of many documents. Tokens a second; MFU, of the FLOPs that the model
    needs, without recomputation, and of the data sheet; the peak of memory; of one more step, under a profiler, the
    milliseconds of all kernels and of those that take most.
plan: the peak of the same steps by a dry run (docs/plan.md). It needs no GPU.
kernels: the 8B row of 8k with each of `kernels.*`, and parallel.gradient_accumulation_fusion, off, and all of them.
rl: GRPO with generation in process: seconds to generate, for log-probabilities and training, and to sync weights.

--device cpu runs the same code on few tokens of tiny layers: its figures mean nothing.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from device_step import SHAPES

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import Config
from isoloss.engine.run.records import RunRecords
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy
from isoloss.parallel.runtime import device
from isoloss.recipes.launch import compose_config
from isoloss.tools.plan.hardware import GPUS
from isoloss.tools.plan.stages import dry_run

GIB = 1 << 30
TOLD_KERNELS = 15
WARM_UP, STEPS = 2, 3
MICRO_BATCHES = 2
# Shape, layers, tokens of a row, documents in it, and keys.
FULL = ("memory.recompute=full",)
STEP_CASES: tuple[tuple[str, int, int, int, tuple[str, ...]], ...] = (
    ("8b", 6, 8192, 1, ()),
    ("8b", 6, 8192, 32, ()),
    ("8b", 6, 32768, 1, ()),
    ("8b", 4, 131072, 1, FULL),
    ("30b_a3b", 3, 8192, 1, ()),
    ("30b_a3b", 3, 32768, 8, FULL),
)
FUSION = "parallel.gradient_accumulation_fusion=false"
OFF = {
    "attention": "kernels.attention=blocks",
    "rope": "kernels.rope=false",
    "activation": "kernels.activation=false",
    "residual and norm": "kernels.residual_norm=false",
    "loss head": "kernels.loss_head=false",
    "weight gradients": FUSION,
}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 512, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}  # fmt: skip
# Generation in process is for small models.
POLICY = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
          "head_dim": 128, "num_hidden_layers": 28}  # fmt: skip
RL_KEYS = ("train.precision=bf16", "train.steps=8", "batch.global_size=16", "rollout.num_generations=8",
           "rollout.max_new_tokens=128", "data.max_length=256", "data.eval=[]")  # fmt: skip


def write_model(folder: Path, shape: str, layers: int, *, tiny: bool) -> None:
    config = SHAPES[shape] | {"num_hidden_layers": layers}
    if tiny:
        config |= {key: value for key, value in TINY.items() if key in config}
    (folder / "config.json").write_text(json.dumps(config))


def measure_step(folder: str, tokens: int, documents: int, keys: Sequence[str]) -> dict[str, Any]:
    """Of MICRO_BATCHES rows of so many tokens, in this process."""
    overrides = step_keys(folder, tokens, keys)
    config = compose_config("sft", Config, overrides)[0]
    engine, loss = Engine(config), cross_entropy(config.loss)
    random, length = torch.Generator().manual_seed(0), tokens // documents
    mask_T = torch.arange(length) > 0
    samples = [
        Sample(torch.randint(engine.arch.vocab_size, (length,), generator=random), mask_T)
        for _ in range(MICRO_BATCHES * documents)
    ]
    for _ in range(WARM_UP):
        engine.train_step(samples, loss)
    synchronize()
    started = time.perf_counter()
    for _ in range(STEPS):
        metrics, _ = engine.train_step(samples, loss)
    synchronize()
    seconds = (time.perf_counter() - started) / STEPS
    flops = 3 * len(samples) * float(engine.cost_model.cost(length))
    peak = device.peak_bytes()
    row: dict[str, Any] = {
        "seconds": seconds,
        "tokens_per_second": len(samples) * length / seconds,
        "tflops": flops / seconds / 1e12,
        "loss": metrics.loss,
        "micro_batches": metrics.micro_batches,
        "peak_gib": None if peak is None else peak / GIB,
    }
    if gpu := data_sheet():
        row["mfu"] = flops / seconds / gpu.flops
    return row | kernel_table(engine, samples, loss)


def step_keys(folder: str, tokens: int, keys: Sequence[str]) -> list[str]:
    return [f"model.path={folder}", "model.from_scratch=true", "data.train=[rows.jsonl]", "train.precision=bf16",
            f"batch.max_tokens={tokens}", f"data.max_length={tokens}", *keys]  # fmt: skip


def kernel_table(engine: Engine, samples: Sequence[Sample], loss: Any) -> dict[str, Any]:
    """One more step under torch's profiler: launches, and milliseconds by kernel."""
    on_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        engine.train_step(samples, loss)
        synchronize()
    events = profiler.key_averages()
    spent = [((event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3, event) for event in events]
    spent.sort(key=lambda each: -each[0])
    table = [{"kernel": event.key, "ms": ms, "calls": event.count} for ms, event in spent[:TOLD_KERNELS]]
    busy = sum(ms for ms, _ in spent)
    return {"kernels": table, "launches": sum(event.count for _, event in spent), "kernels_ms": busy}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def data_sheet() -> Any:
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((gpu for key, gpu in GPUS.items() if key in name), None)


def planned_gib(folder: str, tokens: int, documents: int, keys: Sequence[str]) -> float:
    """The peak of a dry run of the same step."""
    keys = [key for key in keys if not key.startswith("train.device")]
    return dry_run("sft", step_keys(folder, tokens, keys), 1, 0, "--documents", str(documents)).peak.peak / GIB


def measure_rl(folder: Path, keys: Sequence[str]) -> dict[str, Any]:
    """The grpo recipe on the shipped task of sorting letters: means over the generated batches but the first."""
    source = Path(str(files("isoloss.recipes") / "assets" / "sort"))
    shutil.copytree(source, folder / "model")
    config = json.loads((source / "config.json").read_text())
    changes = {} if "train.device=cpu" in keys else POLICY
    (folder / "model" / "config.json").write_text(json.dumps(config | changes))
    command = [sys.executable, "-m", "isoloss.recipes.grpo", "preset=tiny", f"model.path={folder / 'model'}"]
    command += ["model.from_scratch=true", f"output_dir={folder / 'run'}", *keys]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = list(RunRecords(folder / "run").metrics())
    rows = [row for row in lines if row.get("generate_seconds")][1:] or lines
    names = ("generate_seconds", "train_seconds", "sync_seconds", "response_length_mean", "tokens_per_second")
    return {name: sum(row.get(name) or 0.0 for row in rows) / len(rows) for name in names}


# ---- one process a figure --------------------------------------------------------------------------------------------


def in_a_process(task: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """What a task gives, or why it gave nothing."""
    command = [sys.executable, __file__, "--task", json.dumps(task)]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if task["device"] == "cpu" else {})
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {seconds:.0f} s"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"status {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def run_task(task: Mapping[str, Any]) -> dict[str, Any]:
    tiny, keys = task["device"] == "cpu", tuple(task["keys"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if task["kind"] == "rl":
            return measure_rl(folder, keys)
        write_model(folder, task["shape"], task["layers"], tiny=tiny)
        if task["kind"] == "plan":
            return {"planned_gib": planned_gib(name, task["tokens"], task["documents"], keys)}
        return measure_step(name, task["tokens"], task["documents"], keys)


def tasks(only: Sequence[str], on: str) -> dict[str, dict[str, Any]]:
    """By name. On a CPU one of each kind, of few tokens."""
    tiny = on == "cpu"
    named: dict[str, dict[str, Any]] = {}
    for shape, layers, tokens, documents, keys in STEP_CASES[::4] if tiny else STEP_CASES:
        size = {"layers": 2, "tokens": 64, "documents": 2} if tiny else {}
        of_step = {"kind": "step", "shape": shape, "layers": layers, "tokens": tokens, "documents": documents}
        name = f"{shape} {tokens // 1024}k x{documents}"
        named[f"step {name}"] = of_step | size | {"keys": keys}
        named[f"plan {name}"] = named[f"step {name}"] | {"kind": "plan"}
    first = next(iter(named.values())) | {"kind": "kernels"}
    off = {**{name: (key,) for name, key in OFF.items()}, "all": tuple(OFF.values())}
    named |= {f"kernels without {name}": first | {"keys": keys} for name, keys in off.items()}
    named["rl grpo"] = {"kind": "rl", "keys": ("train.steps=2", "batch.global_size=4") if tiny else RL_KEYS}
    on_cpu = ("train.device=cpu",) if tiny else ()
    return {
        name: task | {"keys": (*task["keys"], *on_cpu), "device": on}
        for name, task in named.items()
        if task["kind"] in only
    }


def told(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return row["failed"]
    shown = {key: value for key, value in row.items() if isinstance(value, float)}
    return "  ".join(f"{key} {value:.4g}" for key, value in shown.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--only", nargs="*", default=["step", "plan", "kernels", "rl"])
    parser.add_argument("--minutes", type=float, default=18)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task is not None:
        print(json.dumps(run_task(json.loads(arguments.task))))
        return
    if arguments.device == "cuda" and arguments.only != ["plan"] and not torch.cuda.is_available():
        print("no GPU: nothing was measured (--device cpu tries the script)")
        return
    deadline = time.monotonic() + 60 * arguments.minutes
    versions = {name: version(name) for name in ("torch", "megatron-core", "transformers")}
    figures: dict[str, Any] = {"device": device.describe(1), "versions": versions, "rows": {}, "left_out": []}
    for name, task in tasks(arguments.only, arguments.device).items():
        left = deadline - time.monotonic()
        if left <= 0:
            figures["left_out"].append(name)
            continue
        figures["rows"][name] = in_a_process(task, left)
        print(f"{name:34}{told(figures['rows'][name])}", flush=True)
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")
    for name in figures["left_out"]:
        print(f"{name:34}no time was left")
    arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
