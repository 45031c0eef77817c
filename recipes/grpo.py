"""Reinforcement learning with group-relative advantages (GRPO and its relatives; PPO with algorithm.advantage=gae).

python -m isoloss.recipes.grpo model.path=DIR data.train=PROMPTS.jsonl reward.function=math
torchrun --nproc_per_node 4 -m isoloss.recipes.grpo parallel.tp=2 model.path=DIR data.train=PROMPTS.jsonl
python -m isoloss.recipes.grpo --help                            # presets and keys
"""

import sys

from isoloss.engine.rl.config import RLConfig
from isoloss.recipes import launch


def run(config: RLConfig, run_name: str) -> None:
    # Its import takes seconds: help and a mistake in the command line do not wait for it.
    from isoloss.engine.rl.loop import train_rl

    train_rl(config, run_name)


def main() -> int:
    return launch.main("grpo", RLConfig, run)


if __name__ == "__main__":
    sys.exit(main())
