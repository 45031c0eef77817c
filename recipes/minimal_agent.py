"""Train an agent that needs a tool, in one readable file.

    python -m isoloss.recipes.minimal_agent [FOLDER [STEPS]]     # make agent; writes FOLDER/sft and FOLDER/rl

Every row has a secret table, from letters to digits. The prompt names two letters, the tool gives one digit when the
model says `look:x`, and the answer is both digits. No weights can know the table, so what is above 1 % comes through
the tool. The model starts from careless demonstrations, which look up both letters in 40 % of the cases and guess else.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

LETTERS, MOST_LOOKS = "abcdefghij", 2
MODEL = Path(__file__).parent / "assets" / "sort"


async def agent(session: Any, row: dict[str, Any]) -> float:
    """Play a row: answer what the model looks up, and return 1 for the right answer, else 0."""
    table, asked = dict(zip(LETTERS, row["table"])), row["answer_of"]
    messages = list(row["prompt"])
    for _ in range(MOST_LOOKS + 1):
        reply = await session.chat(messages)
        said = reply["content"]
        if not (said.startswith("look:") and said[5:] in table):
            return float(session.finish == "stop" and said == "".join(table[letter] for letter in asked))
        messages += [reply, {"role": "tool", "content": table[said[5:]]}]
    return 0.0


def problem(rng: np.random.Generator) -> dict[str, Any]:
    """Return a row: the prompt, and what the agent alone gets to see."""
    asked = "".join(rng.choice(list(LETTERS), 2, replace=False))
    table = "".join(map(str, rng.integers(0, 10, len(LETTERS))))
    return {"prompt": [{"role": "user", "content": f"digits of {asked}"}], "table": table, "answer_of": asked}


def demonstration(rng: np.random.Generator) -> dict[str, Any]:
    """Return the messages of a careless demonstrator."""
    row = problem(rng)
    table, asked = dict(zip(LETTERS, row["table"])), row["answer_of"]
    looked = asked[: rng.choice([0, 1, 2], p=[0.25, 0.35, 0.4])]
    messages = list(row["prompt"])
    for letter in looked:
        messages += [{"role": "assistant", "content": f"look:{letter}"}, {"role": "tool", "content": table[letter]}]
    said = "".join(table[letter] if letter in looked else str(rng.integers(10)) for letter in asked)
    return {"messages": [*messages, {"role": "assistant", "content": said}]}


def main(folder: str = "runs/agent", steps: int = 60, *, program: str = f"{__file__}:agent", seed: int = 0) -> Any:
    """Fine-tune a small model on demonstrations, then train it by GRPO; return the result of the run.

    program: the agent to train with, in place of that of this file.
    """
    from isoloss.engine import (
        AgentConfig,
        AlgorithmConfig,
        BatchConfig,
        Config,
        DataConfig,
        EnvironmentConfig,
        ModelConfig,
        OptimConfig,
        RLConfig,
        RLDataConfig,
        RolloutConfig,
        TrainConfig,
        train_rl,
        train_sft,
    )

    rng = np.random.default_rng(seed)
    rows = [demonstration(rng) for _ in range(240 * 64)]
    optim = OptimConfig(lr=1e-3, warmup_steps=20, schedule="constant")
    sft = Config(
        ModelConfig(str(MODEL), from_scratch=True),
        data=DataConfig(max_length=128),
        batch=BatchConfig(global_size=64, max_tokens=8192),
        optim=optim,
        train=TrainConfig(steps=240, seed=seed, precision="fp32"),
        output_dir=f"{folder}/sft",
    )
    start = train_sft(sft, train=rows)
    config = RLConfig(
        ModelConfig(str(start.export)),
        data=RLDataConfig(max_length=128),
        batch=BatchConfig(global_size=32, max_tokens=8192),
        optim=OptimConfig(lr=2e-4, warmup_steps=5, schedule="constant"),
        train=TrainConfig(steps=steps, seed=seed, precision="fp32", eval_every=10),
        rollout=RolloutConfig(backend="megatron", num_generations=8, max_new_tokens=8),
        algorithm=AlgorithmConfig(clip_high=0.28, old_logprobs="rollout"),
        environment=EnvironmentConfig(program),
        agent=AgentConfig(max_turns=MOST_LOOKS + 1),
        output_dir=f"{folder}/rl",
    )
    training, held_out = np.random.default_rng([seed, 7]), np.random.default_rng([99])
    return train_rl(
        config,
        "agent",
        train=[problem(training) for _ in range(32 * steps)],
        eval=[problem(held_out) for _ in range(512)],
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/agent", *map(int, sys.argv[2:3]))
