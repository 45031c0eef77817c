"""A training step and the run around it. These names are the ones a training loop of your own needs."""

import importlib
from typing import TYPE_CHECKING, Any

import isoloss.parallel  # noqa: F401 (before the first import of Megatron-Core, whatever is imported from here)

if TYPE_CHECKING:
    from isoloss.engine.batching.sample import Sample
    from isoloss.engine.config.schema import (
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
    from isoloss.engine.step.engine import Engine
    from isoloss.engine.step.losses import Loss, Term, TokenInputs, negative_log_likelihood, target_logprobs

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
    "target_logprobs",
]
# Imported when they are first asked for: the engine's take seconds, a configuration's none.
_LATER = {"Engine": "step.engine", "Sample": "batching.sample"} | dict.fromkeys(
    ("Loss", "Term", "TokenInputs", "negative_log_likelihood", "target_logprobs"), "step.losses"
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER.get(name, 'config.schema')}"), name)
