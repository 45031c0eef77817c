"""The recipes and their readable twins, as what their first steps tell."""

import contextlib
from pathlib import Path

from isoloss.engine.config.schema import Config
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.loop import train_rl
from isoloss.engine.run.records import RunRecords
from isoloss.engine.sft.loop import train_sft
from isoloss.engine.step.engine import Engine
from isoloss.recipes import minimal_rl, minimal_sft
from isoloss.recipes.launch import compose_config


def recipe_losses(folder: str, steps: int) -> list[float]:
    """The tiny preset, `steps` steps, into `folder`."""
    overrides = [f"train.steps={steps}", "data.eval=[]", f"output_dir={folder}/run", f"data.cache_dir={folder}/cache"]
    config = compose_config("sft", Config, [*overrides, "checkpoint.export_hf=false"])[0]
    train_sft(config, "sft-tiny")
    return [row["loss"] for row in RunRecords(Path(folder) / "run").metrics()]


def minimal_losses(folder: str, steps: int) -> list[float]:
    with contextlib.chdir(folder):
        return minimal_sft.main(steps)


def first_weights(folder: str) -> None:
    """What the tiny preset starts from, as a folder of Hugging Face."""
    Engine(compose_config("sft", Config, [])[0]).export_hf(folder)


def recipe_rl_steps(model: str, task: str, folder: str, steps: int) -> list[minimal_rl.Step]:
    """The tiny preset of grpo, its ratios starting from the rollout's probabilities, as its readable twin has it."""
    overrides = [f"model.path={model}", f"data.train={task}/rl.jsonl", "data.eval=[]", f"train.steps={steps}"]
    overrides += ["preset=tiny", "algorithm.old_logprobs=rollout", f"output_dir={folder}", "checkpoint.export_hf=false"]
    train_rl(compose_config("grpo", RLConfig, overrides)[0], "grpo-tiny")
    rows = RunRecords(Path(folder)).metrics()
    return [minimal_rl.Step(row["reward_mean"], row["loss"], row["grad_norm"]) for row in rows]


def minimal_rl_steps(model: str, task: str, steps: int) -> list[minimal_rl.Step]:
    return minimal_rl.main(model, steps, task=Path(task))
