"""Train by reinforcement learning in one readable file: without the library's loop and Hydra, by its verbs alone.

    python -m isoloss.recipes.sft preset=sort output_dir=runs/sft-sort      # a start: right in a quarter of its answers
    python -m isoloss.recipes.minimal_rl runs/sft-sort/hf [STEPS]
    torchrun --nproc_per_node 2 -m isoloss.recipes.minimal_rl runs/sft-sort/hf   # the same numbers, on two ranks

GRPO on the sort task: the reward is 1 for the right answer and 0 for any other, and the advantage of a completion
compares it with the others of its prompt. `isoloss.recipes.grpo` is the same loop with presets, checkpoints, metrics,
reward functions in processes of their own, dynamic sampling, other algorithms and rollouts on servers.

Shape suffixes: P prompts, G completions of each, T tokens of a sample, N tokens of a micro-batch that are trained on.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.engine import (
    BatchConfig,
    Completion,
    Config,
    DataConfig,
    Engine,
    Loss,
    ModelConfig,
    OptimConfig,
    Prompt,
    Sample,
    Sampling,
    TokenInputs,
    TrainConfig,
    draw_indices,
    learning_rate,
    load_prompts,
)

SORT = Path(__file__).parent / "assets" / "sort"
NUM_PROMPTS, NUM_GENERATIONS, MINIBATCHES = 32, 8, 2
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
MAX_NEW_TOKENS, SEED = 6, 0


@dataclass(frozen=True)
class Step:
    """Metrics of an optimizer step. reward: mean of the generated batch that the step learns from."""

    reward: float
    loss: float
    grad_norm: float


def reward(text: str, completion: Completion, prompt: Prompt) -> float:
    """Return 1 for a right answer that the model ended itself, else 0."""
    return float(completion.finish == "stop" and text.strip() == prompt.answer)


def group_advantages(rewards_PG: Tensor) -> Tensor:
    """Return rewards relative to those of the same prompt, [P, G]: Shao et al. 2024, arXiv 2402.03300."""
    return (rewards_PG - rewards_PG.mean(1, keepdim=True)) / (rewards_PG.std(1, keepdim=True) + 1e-6)


def clip_loss(inputs: TokenInputs) -> Tensor:
    """Return PPO's clipped surrogate of every token, [N]; the engine weights and sums it."""
    advantages_N = inputs.fields["advantages"]
    ratio_N = torch.exp(inputs.logprobs_N - inputs.fields["rollout_logprobs"])
    return -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages_N)


def to_sample(prompt: Prompt, completion: Completion, advantage: float) -> Sample:
    """Return a sample of the tokens of prompt and completion, without tokenizing again; the completion is trained."""
    tokens_T = torch.tensor([*prompt.tokens, *completion.tokens])
    mask_T = torch.arange(len(tokens_T)) >= len(prompt.tokens)
    logprobs_T = torch.tensor([0.0] * len(prompt.tokens) + list(completion.logprobs), dtype=torch.float64)
    return Sample(tokens_T, mask_T, fields={"advantages": advantage * mask_T, "rollout_logprobs": logprobs_T})


def generate(engine: Engine, prompts: Sequence[Prompt], ids: Sequence[str]) -> tuple[list[Completion], list[float]]:
    """Return a completion of each prompt by the engine's weights, and its reward; the same on every rank.

    ids: seeds of the completions, which depend on no other.
    """
    sampling = Sampling(MAX_NEW_TOKENS, stop_token_ids=(engine.tokenizer.eos_token_id,), seed=SEED)
    completions = engine.generate([prompt.tokens for prompt in prompts], sampling, ids=ids)
    texts = [engine.tokenizer.decode([*completion.tokens], skip_special_tokens=True) for completion in completions]
    return completions, list(map(reward, texts, completions, prompts))


def main(folder: str, steps: int = 60, *, task: Path = SORT) -> list[Step]:
    """Train the model of a Hugging Face folder; return the metrics of every optimizer step.

    task: folder with problems: rl.jsonl to train on, and eval.jsonl to evaluate on.
    """
    config = Config(
        model=ModelConfig(path=folder),
        batch=BatchConfig(max_tokens=8192),  # tokens of a micro-batch: decides memory, never the loss
        optim=OptimConfig(lr=2e-4, warmup_steps=5, schedule="constant"),
        train=TrainConfig(precision="fp32", seed=SEED),
    )
    engine = Engine(config)
    data = DataConfig(train=(str(task / "rl.jsonl"),), eval=(str(task / "eval.jsonl"),))
    problems, held_out = (
        load_prompts(data, split, engine.tokenizer, max_prompt_tokens=64).prompts for split in ("train", "eval")
    )
    loss = Loss.of(clip_loss, aggregation="token-mean")

    def report(line: str) -> None:
        if dist.get_rank() == 0:
            print(line, flush=True)

    def held_out_reward() -> float:
        return float(np.mean(generate(engine, held_out, [f"{prompt.id}/eval/0" for prompt in held_out])[1]))

    history: list[Step] = []
    report(f"held-out reward {held_out_reward():.3f}")
    while len(history) < steps:
        first = len(history) // MINIBATCHES * NUM_PROMPTS
        rows = draw_indices(len(problems), first, NUM_PROMPTS, SEED).tolist()
        drawn = [(f"{problems[row].id}/{draw}", problems[row]) for draw, row in enumerate(rows, start=first)]
        prompts = [prompt for _, prompt in drawn for _ in range(NUM_GENERATIONS)]
        ids = [f"{id}/{k}" for id, _ in drawn for k in range(NUM_GENERATIONS)]
        completions, rewards = generate(engine, prompts, ids)
        advantages_PG = group_advantages(torch.tensor(rewards, dtype=torch.float64).view(NUM_PROMPTS, -1))
        samples = list(map(to_sample, prompts, completions, advantages_PG.flatten().tolist()))
        # Every rank gives the same samples. The engine divides them among the ranks, and counts over all.
        order = np.random.default_rng([SEED, len(history), 0]).permutation(len(samples))
        for part in np.array_split(order, MINIBATCHES):
            metrics = engine.forward_backward([samples[index] for index in part], loss)
            result = engine.optim_step(learning_rate(len(history), config.optim, steps))
            history.append(Step(sum(rewards) / len(rewards), metrics.loss, result.grad_norm))
        report(f"step {len(history):3}  reward {history[-1].reward:.3f}  gradient norm {history[-1].grad_norm:.6f}")
    report(f"held-out reward {held_out_reward():.3f}")
    return history


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("name the folder of a model to start from: python -m isoloss.recipes.minimal_rl DIR [STEPS]")
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
