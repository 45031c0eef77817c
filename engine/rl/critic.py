"""The critic of PPO: the same engine with a value head."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from isoloss.engine import checkpoint
from isoloss.engine.batch import Sample
from isoloss.engine.checkpoint_writer import HostCopies
from isoloss.engine.engine import Engine
from isoloss.engine.rank0 import is_main
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.losses import value_loss

FOLDER = "critic_checkpoints"


class Critic:
    """Expected returns before every token, learned beside the policy in its layout.

    It starts from the policy's weights, with a head of zeros: before the first step every value is 0.
    """

    def __init__(self, config: RLConfig, policy: Engine):
        optim = replace(config.optim, lr=config.algorithm.critic_lr, min_lr=0.0, schedule="constant", warmup_steps=0)
        self._engine = Engine(replace(config, optim=optim), policy.source, critic_of=policy)
        self._loss = value_loss(config.algorithm, config.loss)

    def values(self, samples: Sequence[Sample]) -> list[Tensor]:
        """As `Engine.values`."""
        return self._engine.values(samples)

    def train_step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step on the samples' returns; what the metrics tell of it. Collective over the world."""
        metrics, result = self._engine.train_step(samples, self._loss)
        return {
            "value_loss": metrics.loss,
            "critic_grad_norm": result.grad_norm,
            "critic_lr": result.lr,
            "critic_seconds": metrics.seconds + result.seconds,
        }

    def leave_device(self) -> None:
        """As `Engine.leave_device`."""
        self._engine.leave_device()

    def stage(self, output_dir: Path, step: int, copies: HostCopies | None) -> checkpoint.Staged:
        """Its checkpoint, to be written before the policy's of the same step: one that is there already was left by a
        run that was killed between the two, and is replaced. copies: as `Engine.stage`. Collective over the world."""
        folder = _folder(output_dir, step)
        if is_main():
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()  # no rank looks for the folder before it is gone
        return self._engine.stage(folder, copies=copies)

    def load(self, output_dir: Path, step: int) -> None:
        self._engine.load(_folder(output_dir, step))


def _folder(output_dir: Path, step: int) -> Path:
    return output_dir / FOLDER / checkpoint.STEP_FOLDER.format(step)
