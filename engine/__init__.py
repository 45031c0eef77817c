"""A training step and the run around it. These names are the ones a training loop of your own needs."""

import isoloss.parallel  # noqa: F401, I001 (the CPU host must be there before the first import of Megatron-Core)

from isoloss.engine.batch import Sample
from isoloss.engine.config import (
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from isoloss.engine.engine import Engine
from isoloss.engine.losses import Loss, Term, TokenInputs, negative_log_likelihood

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "Engine",
    "Loss",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "Sample",
    "Term",
    "TokenInputs",
    "TrainConfig",
    "negative_log_likelihood",
]
