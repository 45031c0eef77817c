"""The SFT recipe and its readable twin, as losses of their first steps."""

import contextlib
import json
from pathlib import Path

from isoloss.engine.config import Config
from isoloss.engine.trainer import train_sft
from isoloss.recipes import minimal_sft
from isoloss.recipes.launch import compose_config


def recipe_losses(folder: str, steps: int) -> list[float]:
    """The tiny preset, `steps` steps, into `folder`."""
    overrides = [f"train.steps={steps}", "data.eval=[]", f"output_dir={folder}/run", f"data.cache_dir={folder}/cache"]
    config = compose_config("sft", Config, [*overrides, "checkpoint.export_hf=false"])[0]
    train_sft(config, "sft-tiny")
    rows = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


def minimal_losses(folder: str, steps: int) -> list[float]:
    with contextlib.chdir(folder):
        return minimal_sft.main(steps)
