"""Train language models: whole runs as functions, and the names that a training loop of your own needs."""

import importlib
from typing import TYPE_CHECKING, Any

from isoloss.parallel import PreemptedError, UserError  # before the first import of Megatron-Core, whatever comes next

if TYPE_CHECKING:
    from isoloss.engine.batching.sample import Sample
    from isoloss.engine.config.schema import (
        BatchConfig,
        CheckpointConfig,
        Config,
        DataConfig,
        LoraConfig,
        LossConfig,
        MemoryConfig,
        ModelConfig,
        MoeConfig,
        OptimConfig,
        ParallelConfig,
        TrainConfig,
    )
    from isoloss.engine.data.chat import load_tokenizer
    from isoloss.engine.data.dataset import draw_indices, load_dataset, step_indices
    from isoloss.engine.data.in_memory import load_rows, to_samples
    from isoloss.engine.rl.agent_config import AgentConfig, EnvironmentConfig
    from isoloss.engine.rl.config import AlgorithmConfig, RewardConfig, RLConfig, RLDataConfig, RolloutConfig
    from isoloss.engine.rl.generation import Engine
    from isoloss.engine.rl.loop import train_rl
    from isoloss.engine.rl.prompts import load_prompts
    from isoloss.engine.rl.trajectory import Completion, Prompt, Sampling
    from isoloss.engine.run.callbacks import Callbacks
    from isoloss.engine.run.result import RunResult
    from isoloss.engine.sft.loop import train_sft
    from isoloss.engine.step.engine import Limits, OptimResult
    from isoloss.engine.step.forward_backward import StepMetrics
    from isoloss.engine.step.losses import Loss, Term, TokenInputs, negative_log_likelihood, target_logprobs
    from isoloss.engine.step.optimizer import learning_rate
    from isoloss.engine.step.together import forward_backward_together

__all__ = [
    "AgentConfig",
    "AlgorithmConfig",
    "BatchConfig",
    "Callbacks",
    "CheckpointConfig",
    "Completion",
    "Config",
    "DataConfig",
    "Engine",
    "EnvironmentConfig",
    "Limits",
    "LoraConfig",
    "Loss",
    "LossConfig",
    "MemoryConfig",
    "ModelConfig",
    "MoeConfig",
    "OptimConfig",
    "OptimResult",
    "ParallelConfig",
    "PreemptedError",
    "Prompt",
    "RLConfig",
    "RLDataConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunResult",
    "Sample",
    "Sampling",
    "StepMetrics",
    "Term",
    "TokenInputs",
    "TrainConfig",
    "UserError",
    "draw_indices",
    "forward_backward_together",
    "learning_rate",
    "load_dataset",
    "load_prompts",
    "load_rows",
    "load_tokenizer",
    "negative_log_likelihood",
    "step_indices",
    "target_logprobs",
    "to_samples",
    "train_rl",
    "train_sft",
]
# Modules, imported when one of their names is first asked for: the engine's take seconds, a configuration's none.
_MODULES = {
    "batching.sample": "Sample",
    "config.schema": (
        "BatchConfig CheckpointConfig Config DataConfig LoraConfig LossConfig MemoryConfig ModelConfig MoeConfig "
        "OptimConfig ParallelConfig TrainConfig"
    ),
    "data.chat": "load_tokenizer",
    "data.dataset": "draw_indices load_dataset step_indices",
    "data.in_memory": "load_rows to_samples",
    "rl.agent_config": "AgentConfig EnvironmentConfig",
    "rl.config": "AlgorithmConfig RLConfig RLDataConfig RewardConfig RolloutConfig",
    "rl.generation": "Engine",
    "rl.loop": "train_rl",
    "rl.prompts": "load_prompts",
    "rl.trajectory": "Completion Prompt Sampling",
    "run.callbacks": "Callbacks",
    "run.result": "RunResult",
    "sft.loop": "train_sft",
    "step.engine": "Limits OptimResult",
    "step.forward_backward": "StepMetrics",
    "step.losses": "Loss Term TokenInputs negative_log_likelihood target_logprobs",
    "step.optimizer": "learning_rate",
    "step.together": "forward_backward_together",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
