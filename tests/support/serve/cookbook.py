"""Runs recipes of the tinker-cookbook, as they are, in the clients' environment.

    cd tests && python -m support.serve.cookbook sl_loop max_steps=10

runs one against the server of `make serve`, with the words of SMALL before those given.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.serve import offline
from support.serve.server import PYTHON, ROOT, environment

NAME = "Qwen/Qwen3-8B"
URL = "http://127.0.0.1:8000"
SUMS = "tinker_cookbook.recipes.math_rl.arithmetic_env:ArithmeticDatasetBuilder"
CHAT = "tinker_cookbook.recipes.chat_sl.chat_datasets:NoRobotsBuilder"
PLAIN = "renderer_name=qwen3_disable_thinking"
MATH = (PLAIN, "groups_per_batch=32", "group_size=8", "learning_rate=4e-3", "max_tokens=6", "eval_every=0")
# Words that make a recipe fit the small model and data.
SMALL: dict[str, tuple[str, ...]] = {
    "sl_loop": ("batch_size=32", "learning_rate=1e-2", "max_steps=20"),
    "sl_basic": (
        f"dataset_builder={CHAT}", "dataset_builder.common_config.batch_size=32",
        "dataset_builder.common_config.max_length=512", "dataset_builder.common_config.renderer_name=qwen3",
        f"dataset_builder.common_config.model_name_for_tokenizer={NAME}", "learning_rate=1e-2", "max_steps=20",
    ),
    "chat_sl.train": ("batch_size=32", "learning_rate=1e-2", "max_length=512", "eval_every=5", "max_steps=20"),
    "prompt_distillation.train": (
        PLAIN, "file_path=prompt_distillation/train.jsonl", "batch_size=64", "learning_rate=5e-3", "max_steps=20",
    ),
    "rl_loop": (
        "loss_fn=importance_sampling", "batch_size=16", "group_size=8", "learning_rate=4e-3", "max_tokens=24",
        "max_steps=20",
    ),
    "rl_basic": (
        PLAIN, f"dataset_builder={SUMS}", "dataset_builder.batch_size=32", "dataset_builder.group_size=8",
        "dataset_builder.n_batches=100", "dataset_builder.renderer_name=qwen3_disable_thinking",
        f"dataset_builder.model_name_for_tokenizer={NAME}", "learning_rate=4e-3", "max_tokens=6", "max_steps=20",
    ),
    "math_rl.train": (*MATH, "loss_fn=importance_sampling", "max_steps=20"),
    "preference.dpo.train": (
        PLAIN, "dataset=hhh", "batch_size=32", "learning_rate=5e-3", "max_length=128", "max_steps=20",
    ),
    "distillation.on_policy_distillation": (
        PLAIN, "dataset=deepmath", f"teacher_model={NAME}", "groups_per_batch=16", "group_size=4", "max_tokens=8",
        "learning_rate=4e-3", "lora_rank=32", "eval_every=0", "max_steps=20",
    ),
}  # fmt: skip
SERVED, SERVER, FOLDER = ROOT / "runs/sft-chat/hf", ROOT / "runs/serve", ROOT / "runs/tinker"


def run_recipe(name: str, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Run a recipe in an offline folder. Return what it printed. Raises AssertionError where it fails.

    name: a module of `tinker_cookbook.recipes`.
    """
    command = [str(PYTHON), "-m", f"tinker_cookbook.recipes.{name}", f"model_name={NAME}", *words]
    # A cache of its own: that of the user has data of other folders under the same names, and would give them.
    environment = {**environment, "HF_HOME": str(folder / ".cache")}
    # Some recipes ask whether to go on where the folder exists already; this answers yes.
    ran = subprocess.run(
        command, cwd=folder, env=environment, input="resume\n", text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert ran.returncode == 0, f"{' '.join(command)}\n{ran.stdout[-4000:]}"
    return ran.stdout


def read_metrics(log_path: Path) -> list[dict[str, float]]:
    """Return the rows that a recipe wrote, in order."""
    return [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]


def series(log_path: Path, name: str) -> list[float]:
    """Return a metric's values in order, of the rows that have it."""
    return [row[name] for row in read_metrics(log_path) if name in row]


def main(argv: Sequence[str] | None = None) -> None:
    """Run a recipe against the server of `make serve`, and print its metrics' first and last values."""
    name, *given = sys.argv[1:] if argv is None else argv
    words = [*SMALL.get(name, ()), *given]
    log_path = FOLDER / "logs" / f"{name}-{time.strftime('%H%M%S')}"
    if not any(word.startswith("log_path=") for word in words):
        words.append(f"log_path={log_path}")
    else:
        log_path = Path(next(word for word in words if word.startswith("log_path=")).partition("=")[2])
    offline.make(FOLDER, SERVED)
    run_recipe(name, words, FOLDER, environment(URL, (SERVER / "api_key").read_text().strip()))
    rows = read_metrics(log_path)
    for metric in sorted(set(rows[0]) | set(rows[-1])):
        print(f"{metric:40} {rows[0].get(metric)!s:24} {rows[-1].get(metric)}")


if __name__ == "__main__":
    main()
