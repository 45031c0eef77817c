"""Losses of reinforcement learning on a grid of layouts, the same for every kind of model."""

import dataclasses
from pathlib import Path

import numpy as np
import torch

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import LossConfig, ModelConfig, TrainConfig
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig, RolloutConfig
from isoloss.tools.prove.parity import Case
from isoloss.tools.prove.proof import rollout_fields
from isoloss.tools.prove.rank_pool import WorkerPool
from support.models.families import VOCAB
from support.ranks.grid import Grid

LOSSES = {
    "grpo": (AlgorithmConfig(kl_coef=0.2, entropy_coef=0.05), "token-mean"),
    "gspo": (AlgorithmConfig(loss="gspo", clip_low=0.02, clip_high=0.03), "seq-mean-token-mean"),
}


def make(pool: WorkerPool, model: ModelConfig, folder: Path) -> Grid:
    """Two prompts of four completions, in fp64 and with a temperature."""
    rng, samples = np.random.default_rng(17), []
    for index, length in enumerate((40, 6, 17, 29, 96, 66, 9, 13)):
        mask = torch.arange(length) >= int(rng.integers(2, 5))
        tokens = torch.from_numpy(rng.integers(0, VOCAB, length))
        fields = rollout_fields(rng.normal(-np.log(VOCAB), 0.3, length), mask, rng)
        samples.append(Sample(tokens, mask, index // 4, fields))
    config = RLConfig(
        model,
        train=TrainConfig(precision="fp64", seed=3),
        rollout=RolloutConfig(max_new_tokens=96, temperature=0.8),
    )
    return Grid(pool, config, samples, folder)


def check(grid: Grid, layout: str) -> None:
    """Of each of LOSSES as `Grid.check`, one in micro-batches of 96 tokens, one in a single one."""
    cases = [
        Case(budget, LossConfig(mode), dataclasses.replace(grid.config, algorithm=algorithm, loss=LossConfig(mode)))
        for budget, (algorithm, mode) in zip((96, 0), LOSSES.values(), strict=True)
    ]
    grid.check(layout, cases)
