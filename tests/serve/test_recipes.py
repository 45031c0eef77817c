"""Recipes of the tinker-cookbook as they are, without a network: each learns, and goes on from its own checkpoint."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.runs.runs import write_rows
from support.serve import cookbook, offline
from support.serve.server import PYTHON, environment, served

from isoloss.recipes import launch
from isoloss.tools.prove.serve.server import Server

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.skipif(not PYTHON.exists(), reason="make .tinker-venv/.ready installs the cookbook"),
    pytest.mark.xdist_group("tinker"),
    pytest.mark.timeout(1200),
]
GSM8K = (
    "dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
    "dataset_builder.batch_size=8",
    "dataset_builder.group_size=8",
    "dataset_builder.convo_prefix=None",
    "dataset_builder.renderer_name=qwen3_disable_thinking",
    f"dataset_builder.model_name_for_tokenizer={cookbook.NAME}",
)


@dataclass(frozen=True)
class Place:
    """A server of a small model that was fine-tuned to add 1 to a digit, and the folder where recipes run."""

    server: Server
    folder: Path

    def run(self, recipe: str, log: str, *words: str) -> Path:
        """Run a recipe. Return the folder of its metrics."""
        log_path = self.folder / "logs" / log
        cookbook.run_recipe(
            recipe, [*words, f"log_path={log_path}"], self.folder, environment(self.server.url, self.server.key)
        )
        return log_path


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("recipes")
    data = write_rows(folder / "sft.jsonl", offline.boxed_rows((1,), count=2048, mistakes=0.7))
    words = ["preset=chat", f"data.train={data}", "train.steps=150", "optim.lr=1.5e-2", f"output_dir={folder}/sft"]
    assert launch.main("sft", words) == 0
    offline.make(folder, folder / "sft/hf", second=(1,))
    with served(folder / "serve", f"model.path={folder}/sft/hf", "model.from_scratch=false") as server:
        yield Place(server, folder)


def checkpoint(log: Path) -> str:
    """Return the path of the state that a recipe saved last."""
    rows = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
    return next(row["state_path"] for row in reversed(rows) if row.get("state_path"))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_sl_loop_learns(place):
    log = place.run("sl_loop", "sl_loop", "batch_size=16", "learning_rate=1e-2", "max_steps=6")
    losses = cookbook.series(log, "train_mean_nll")
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]


def test_chat_sl_goes_on_from_its_checkpoint(place):
    """A second run sees the same rows: its first loss is far below that of the first run."""
    words = ("batch_size=16", "learning_rate=1e-2", "max_length=512", "eval_every=0")
    first = place.run("chat_sl.train", "chat_sl", *words, "max_steps=4")
    second = place.run("chat_sl.train", "again", *words, "max_steps=1", f"load_checkpoint_path={checkpoint(first)}")
    losses, again = (cookbook.series(log, "train_mean_nll") for log in (first, second))
    assert len(losses) == 4 and len(again) == 1 and again[0] < (losses[0] + losses[-1]) / 2


@pytest.mark.slow  # a minute and a half on a quiet machine
def test_rl_basic_learns(place):
    words = ("learning_rate=4e-3", "max_tokens=16", "renderer_name=qwen3_disable_thinking", "max_steps=10")
    log = place.run("rl_basic", "rl_basic", *GSM8K, *words)
    right = cookbook.series(log, "env/all/correct")
    assert len(right) == 10 and mean(right[-3:]) > mean(right[:3]) + 0.25
    assert max(map(abs, cookbook.series(log, "optim/kl_sample_train_v2"))) < 1e-6
    path = checkpoint(log)
    second = place.run("rl_basic", "again_rl", *GSM8K, *words[:-1], "max_steps=2", f"load_checkpoint_path={path}")
    again = cookbook.series(second, "env/all/correct")
    assert len(again) == 2 and mean(again) > mean(right[:3]) + 0.2
