"""Recipes of the tinker-cookbook as they are, without a network: each learns, and goes on from its own checkpoint."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.serve import cookbook, offline
from support.serve.server import PYTHON, Server

from isoloss.recipes import launch, sft

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.skipif(not PYTHON.exists(), reason="make .tinker-venv/.ready installs the cookbook"),
    pytest.mark.xdist_group("tinker"),
    pytest.mark.timeout(1200),
]
SUMS = cookbook.SUMS


@dataclass(frozen=True)
class Place:
    """A server of the fine-tuned model, and the folder where recipes run."""

    server: Server
    folder: Path

    def run(self, recipe: str, log: str, *words: str) -> Path:
        """Run a recipe. Return the folder of its metrics."""
        log_path = self.folder / "logs" / log
        cookbook.run_recipe(recipe, [*words, f"log_path={log_path}"], self.folder, self.server.environment)
        return log_path


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("recipes")
    assert sft.main(["preset=chat", f"output_dir={folder}/sft", "train.steps=300"]) == 0
    server = Server(folder / "serve", f"model.path={folder}/sft/hf", "model.from_scratch=false")
    offline.make(folder, folder / "sft/hf")
    server.wait()
    yield Place(server, folder)
    server.close()


def test_sl_loop(place):
    words = ("batch_size=16", "learning_rate=1e-2", "save_every=4")
    log = place.run("sl_loop", "sl_loop", *words, "max_steps=6")
    assert len(cookbook.series(log, "train_mean_nll")) == 6
