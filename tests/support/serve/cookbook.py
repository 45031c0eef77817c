"""Runs recipes of the tinker-cookbook, as they are, in the clients' environment.

    cd tests && python -m support.serve.cookbook sl_loop batch_size=32 learning_rate=1e-2 max_steps=40

runs one against the server of `make serve`.
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
SERVED, SERVER, FOLDER = ROOT / "runs/sft-chat/hf", ROOT / "runs/serve", ROOT / "runs/tinker"


def run_recipe(name: str, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Run a recipe in an offline folder. Return what it printed. Raises AssertionError where it fails.

    name: a module of `tinker_cookbook.recipes`.
    """
    command = [str(PYTHON), "-m", f"tinker_cookbook.recipes.{name}", f"model_name={NAME}", *words]
    # Recipes that ask whether to go on in a folder that is there already are told to.
    ran = subprocess.run(
        command, cwd=folder, env=environment, input="resume\n", text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
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
    name, *words = sys.argv[1:] if argv is None else argv
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
