"""Runs of agents, on every rank."""

from pathlib import Path
from typing import Literal

from isoloss.engine import (
    AgentConfig,
    AlgorithmConfig,
    BatchConfig,
    EnvironmentConfig,
    ModelConfig,
    OptimConfig,
    RLConfig,
    RLDataConfig,
    RolloutConfig,
    TrainConfig,
    train_rl,
)
from isoloss.engine.run.records import RunRecords


def run(folder: Path, backend: Literal["megatron", "transformers"]) -> tuple[list[dict], list[dict]]:
    """Train for two steps; return rows of metrics, and lines of rollouts.jsonl."""
    config = RLConfig(
        ModelConfig(str(folder / "model"), from_scratch=True),
        data=RLDataConfig(train=(str(folder / "train.jsonl"),), eval=(str(folder / "train.jsonl"),), max_length=256),
        batch=BatchConfig(global_size=2, max_tokens=512),
        optim=OptimConfig(lr=1e-3),
        train=TrainConfig(steps=2, precision="fp32", eval_every=2),
        rollout=RolloutConfig(backend=backend, num_generations=3, max_new_tokens=4),
        algorithm=AlgorithmConfig(advantage="rloo", credit="turn"),
        environment=EnvironmentConfig(f"{folder}/agent.py:agent", retries=1, workers=1),
        agent=AgentConfig(max_turns=5),
        output_dir=str(folder / f"run-{backend}"),
    )
    result = train_rl(config, "agents")
    return result.metrics, [*RunRecords(result.output_dir).rollouts()]
