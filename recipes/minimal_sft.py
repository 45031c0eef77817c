"""Train by supervised fine-tuning in one readable file: without a trainer and Hydra, by the two verbs alone.

    python -m isoloss.recipes.minimal_sft [STEPS]
    torchrun --nproc_per_node 2 -m isoloss.recipes.minimal_sft       # the same numbers, on two ranks

`isoloss.recipes.sft` is the same loop with presets, checkpoints, evaluation, metrics and guards around it.
"""

import sys
from pathlib import Path

import torch.distributed as dist

from isoloss.engine import (
    BatchConfig,
    Config,
    DataConfig,
    Engine,
    Loss,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    learning_rate,
    load_dataset,
    negative_log_likelihood,
    step_indices,
)

TINY = Path(__file__).parent / "assets" / "tiny"
GLOBAL_SIZE = 32  # sequences in an optimizer step, however many ranks and micro-batches there are
SEED = 0


def main(steps: int = 20) -> list[float]:
    """Train the tiny model; return the loss of every step."""
    config = Config(
        model=ModelConfig(path=str(TINY), from_scratch=True),
        batch=BatchConfig(max_tokens=4096),  # tokens of a micro-batch: decides memory, never the loss
        optim=OptimConfig(lr=4e-3, warmup_steps=20, weight_decay=0.1),
        train=TrainConfig(precision="fp32", seed=SEED),
    )
    rows = DataConfig(train=(str(TINY / "train.jsonl"),), max_length=512)
    data = load_dataset(rows, "train", str(TINY), vocab_size=2048, cache_dir=Path("runs/.cache"))
    engine = Engine(config)
    loss = Loss.of(negative_log_likelihood, aggregation="token-mean")

    losses = []
    for step in range(steps):
        # Every rank gives the same samples. The engine divides them among the ranks, and counts over all.
        samples = [data[int(row)] for row in step_indices(len(data), step, GLOBAL_SIZE, SEED)]
        metrics = engine.forward_backward(samples, loss)
        result = engine.optim_step(learning_rate(step, config.optim, steps))
        losses.append(metrics.loss)
        if dist.get_rank() == 0:
            print(f"step {step + 1:3}  loss {metrics.loss:.6f}  gradient norm {result.grad_norm:.6f}", flush=True)
    return losses


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
