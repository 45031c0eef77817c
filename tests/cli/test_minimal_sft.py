"""The recipe and its readable twin give the losses of a plain loop over torch and transformers."""

import json
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from support.runs.optimizer_steps import adamw, fp64_model, mean_loss, step, tokenized
from support.runs.recipes import first_weights, minimal_losses, recipe_losses
from transformers import AutoTokenizer

from isoloss.engine.config.schema import OptimConfig

TINY = Path(str(files("isoloss.recipes") / "assets" / "tiny"))


def plain_losses(folder: Path, steps: int) -> list[float]:
    """The preset, from its file: 32 rows a step in the order of numpy's generator, AdamW, 20 steps of warm-up."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    rows = [json.loads(line) for line in (TINY / "train.jsonl").read_text().splitlines()]
    order = np.random.default_rng([0, 0]).permutation(len(rows))
    losses = []
    with fp64_model(folder) as model:
        optimizer = adamw(model, OptimConfig(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1))
        for number in range(steps):
            of_step = [tokenized(rows[at], tokenizer) for at in order[32 * number : 32 * (number + 1)]]
            loss = mean_loss(model, of_step)
            step(model, optimizer, loss, 4e-3 * (number + 1) / 20, clip=1.0)
            losses.append(loss.item())
    return losses


def test_the_recipe_and_its_readable_twin_are_a_plain_loop(pool, tmp_path):
    pool.run(1, first_weights, str(tmp_path / "start"))
    expected = plain_losses(tmp_path / "start", 2)
    assert expected[1] != pytest.approx(expected[0], rel=1e-4)
    assert pool.run(1, recipe_losses, str(tmp_path), 2)[0] == pytest.approx(expected, rel=1e-6)
    for world in (1, 2):
        for losses in pool.run(world, minimal_losses, str(tmp_path), 2):
            assert losses == pytest.approx(expected, rel=1e-6)
