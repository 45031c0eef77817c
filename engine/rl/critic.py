"""Train the critic of PPO: the policy's engine with a value head."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.checkpoint import checkpoint
from isoloss.engine.checkpoint.writer import HostCopies
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.losses import value_loss
from isoloss.engine.step.engine import Engine
from isoloss.parallel.rank0 import is_main

FOLDER = "critic_checkpoints"


class Critic:
    """A model of the expected return before every token, trained along with the policy and in its layout.

    The critic starts from the policy's weights, with a head of zeros: before the first step every value is 0.
    """

    def __init__(self, config: RLConfig, policy: Engine):
        optim = replace(config.optim, lr=config.algorithm.critic_lr, min_lr=0.0, schedule="constant", warmup_steps=0)
        self._engine = Engine(replace(config, optim=optim), policy.source, critic_of=policy)
        self._loss = value_loss(config.algorithm, config.loss)

    def values(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the expected returns as `Engine.values` does."""
        return self._engine.values(samples)

    def train_step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Take an optimizer step on the samples' returns, and return its metrics. Collective over the world."""
        metrics, result = self._engine.train_step(samples, self._loss)
        return {
            "value_loss": metrics.loss,
            "critic_grad_norm": result.grad_norm,
            "critic_lr": result.lr,
            "critic_seconds": metrics.seconds + result.seconds,
        }

    def offload(self) -> None:
        """Offload the critic as `Engine.offload` does."""
        self._engine.offload()

    def stage(self, output_dir: Path, step: int, copies: HostCopies | None) -> checkpoint.Staged:
        """Stage a checkpoint, to be written before the policy's of the same step: one that is there was left by a
        run that was killed between the two, and is replaced. copies: see `Engine.stage`. Collective over the world."""
        folder = _folder(output_dir, step)
        if is_main():
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()  # no rank looks for the folder before rank 0 has removed it
        return self._engine.stage(folder, copies=copies)

    def load(self, output_dir: Path, step: int) -> None:
        self._engine.load(_folder(output_dir, step))


def _folder(output_dir: Path, step: int) -> Path:
    return output_dir / FOLDER / checkpoint.STEP_FOLDER.format(step)
