"""How long do trainer and servers wait for each other, and what does it cost in reward not to wait?

    python benchmarks/rl_pipeline.py [--out rl_pipeline.json] [--staleness 0 1 2] [--over-sample 1.25] [--steps 16]
        [--sglang]
    python benchmarks/rl_pipeline.py --curves [--seeds 0 1 2] [--out rl_pipeline_curves.json] [key=value ...]

The first runs the grpo recipe on a stand-in for a server (tests/doubles/sglang_server.py) that sleeps for each token,
or with --sglang on a real SGLang server on this CPU (`make test-sglang` installs it). The lengths of completions are
log-normal, and one in twenty is ten times as long. Beside the stand-in the trainer sleeps as well, so that no model
matters; beside a real server it trains the model of `make grpo` from scratch, each on a core of its own. The server
has room for the completions of one batch. Told are, from the first optimizer step to the last: the share of time in
which the trainer waited for completions, in which the server had none to make, and how much of its room was used.

--curves: the task of `make grpo` (sorting letters) from the same start, once for each rollout.max_staleness and seed,
all with algorithm.importance=token; rewards of the recipe's evaluations, on 512 held-out prompts (standard error about
0.02). key=value overrides go to the grpo recipe.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from unittest import mock

from rl_controls import run, train_grpo, versions
from transformers import AutoConfig, AutoModelForCausalLM

from isoloss.engine.rl.backends.servers import generate
from isoloss.engine.run.records import RunRecords
from isoloss.engine.step.engine import Engine

TESTS = Path(__file__).parents[1] / "tests"
sys.path.append(str(TESTS))
from support.servers import server_commands  # noqa: E402

TINY = Path(str(files("isoloss.recipes") / "assets" / "tiny"))
PROMPTS, GENERATIONS = 8, 4  # a batch
ROOM = PROMPTS * GENERATIONS
MEDIAN_TOKENS, MAX_TOKENS, SIGMA, LONG_SHARE = 24, 600, 0.5, 0.05
SECONDS_PER_TOKEN = 0.02  # of the stand-in
TRAIN_SECONDS = 1.0


class Clock:
    """How long requests were under way: with at least one (seconds), and the sum over all (request_seconds)."""

    def __init__(self) -> None:
        self._lock, self._running, self._since = threading.Lock(), 0, time.perf_counter()
        self._seconds = self._request_seconds = 0.0

    def read(self, change: int = 0) -> tuple[float, float, float]:
        """The time now, seconds, request_seconds; so many requests more, or fewer, are under way from now on."""
        with self._lock:
            now = time.perf_counter()
            passed, self._since = now - self._since, now
            self._seconds += passed * (self._running > 0)
            self._request_seconds += passed * self._running
            self._running += change
            return now, self._seconds, self._request_seconds

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        self.read(+1)
        try:
            yield
        finally:
            self.read(-1)


def tokens_of(request_id: str) -> int:
    """How long a completion becomes: the same whenever it is asked for."""
    chance = random.Random(request_id)
    longer = 10 if chance.random() < LONG_SHARE else 1
    return max(1, min(MAX_TOKENS, round(MEDIAN_TOKENS * longer * chance.lognormvariate(0, SIGMA))))


def on_servers(staleness: int, over_sample: float, command: str) -> list[str]:
    """The keys for a server that the run starts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        "rollout.backend=sglang",
        f"rollout.servers=[http://127.0.0.1:{port}]",
        f"rollout.server_command='{command}'",
        "rollout.weight_sync=tensor",
        "rollout.timeout=300",
        f"rollout.max_staleness={staleness}",
        f"rollout.over_sample={over_sample}",
        "algorithm.importance=token",
    ]


def write_inputs(folder: Path, real: bool) -> None:
    shutil.copytree(TINY, folder / "model")
    config = json.loads((TINY / "config.json").read_text())
    small = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    config |= {} if real else small | {"intermediate_size": 48, "num_hidden_layers": 1}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")).save_pretrained(folder / "model")
    rows = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def idle(
    inputs: Path, folder: Path, staleness: int, over_sample: float, steps: int, command: str, sleeps: float
) -> dict[str, float]:
    """Shares of the time from the first optimizer step to the last."""
    clock, told = Clock(), list[tuple[float, float, float]]()
    train_step, complete = Engine.train_step, generate.complete

    def slow_step(engine: Engine, *rest):
        told.append(clock.read())
        time.sleep(sleeps)
        return train_step(engine, *rest)

    def timed(fleet, request, sampling, *rest):
        with clock.request():
            own = dataclasses.replace(sampling, max_new_tokens=tokens_of(request.id))
            return complete(fleet, request, own, *rest)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Engine, "train_step", slow_step))
        stack.enter_context(mock.patch.object(generate, "complete", timed))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        run(
            "grpo", f"model.path={inputs}/model", f"data.train={inputs}/prompts.jsonl",
            f"output_dir={folder}", "data.max_length=1024", f"batch.global_size={PROMPTS}", "batch.max_tokens=8192",
            f"train.steps={steps}", f"rollout.num_generations={GENERATIONS}", f"rollout.max_new_tokens={MAX_TOKENS}",
            f"rollout.concurrency={ROOM}", "reward.function=exact_match", "checkpoint.export_hf=false",
            *on_servers(staleness, over_sample, command),
        )  # fmt: skip
    seconds, busy, request_seconds = (after - before for before, after in zip(told[0], told[-1], strict=True))
    rows = list(RunRecords(folder).metrics())
    return {
        "seconds_per_step": seconds / (steps - 1),
        "trainer_idle": sum(row["generate_seconds"] for row in rows[1:]) / seconds,
        "sync": sum(row["sync_seconds"] for row in rows[1:]) / seconds,
        "server_idle": 1 - busy / seconds,
        "room_used": request_seconds / (seconds * ROOM),
        "staleness_mean": sum(row["staleness_mean"] for row in rows[1:]) / (steps - 1),
        "staleness_max": max(row["staleness_max"] for row in rows),
    }


def measure_idle(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    write_inputs(folder, args.sglang)
    slept = f"{server_commands.DOUBLE} --seconds-per-token {SECONDS_PER_TOKEN}"
    command, sleeps = (server_commands.SGLANG, 0.0) if args.sglang else (slept, TRAIN_SECONDS)
    cases = [(staleness, 1.0) for staleness in args.staleness]
    cases += [(staleness, args.over_sample) for staleness in args.staleness if staleness > 0 and args.over_sample > 1]
    found = {}
    print("| staleness | over-sampling | seconds a step | trainer idle | syncs | server idle | room used | mean age |")
    print("|" + "---|" * 8)
    for staleness, over_sample in cases:
        name = f"staleness {staleness}, over-sampling {over_sample:g}"
        run_folder = folder / f"run-{len(found)}"
        found[name] = each = idle(folder, run_folder, staleness, over_sample, args.steps, command, sleeps)
        print(
            f"| {staleness} | {over_sample:g} | {each['seconds_per_step']:.2f} | {each['trainer_idle']:.0%} | "
            f"{each['sync']:.0%} | {each['server_idle']:.0%} | {each['room_used']:.0%} | "
            f"{each['staleness_mean']:.2f} |",
            flush=True,
        )
    steps = [each["seconds_per_step"] for each in found.values()]
    print(f"steps of the last case take {steps[-1] / steps[0]:.2f} of the time of the first")
    lengths = {"median": MEDIAN_TOKENS, "most": MAX_TOKENS, "sigma": SIGMA, "long_share": LONG_SHARE}
    return {
        "server": command, "lengths": lengths, "train_sleeps": sleeps, "room": ROOM, "steps": args.steps,
        "cases": found,
    }  # fmt: skip


def measure_curves(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    curves: dict[str, dict[str, Sequence]] = {}
    for seed in args.seeds:
        start = folder / f"sft-{seed}"
        run("sft", "preset=sort", f"train.seed={seed}", f"output_dir={start}")
        of_seed = curves[f"seed {seed}"] = {}
        for staleness in args.staleness:
            keys = on_servers(staleness, 1.0, server_commands.DOUBLE)
            name = f"staleness {staleness}"
            with contextlib.redirect_stdout(sys.stderr):
                of_seed[name] = train_grpo(start, folder / f"{seed}-{staleness}", seed, [*keys, *args.overrides])
            rewards = ", ".join(f"{reward:.3f}" for _, reward in of_seed[name])
            print(f"seed {seed}, {name}: {rewards}", flush=True)
    return {"overrides": args.overrides, "curves": curves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the figures go (rl_pipeline.json, rl_pipeline_curves.json)")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--over-sample", type=float, default=1.25, help="also with this one, where it may be; 1: not")
    parser.add_argument("--sglang", action="store_true", help="a real server instead of a stand-in")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of each run, one a batch")
    parser.add_argument("--curves", action="store_true", help="rewards instead of idle time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="with --curves: of the grpo recipe")
    args = parser.parse_args()
    measure, name = (measure_curves, "rl_pipeline_curves.json") if args.curves else (measure_idle, "rl_pipeline.json")
    with tempfile.TemporaryDirectory(prefix="rl-pipeline-") as folder:
        found = measure(args, Path(folder))
    out = args.out or Path(name)
    about = {"versions": versions(), "load_average": os.getloadavg()}
    out.write_text(json.dumps(about | found, indent=2) + "\n")
    print(f"figures in {out}")


if __name__ == "__main__":
    main()
