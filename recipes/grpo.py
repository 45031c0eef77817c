"""Run reinforcement learning with group-relative advantages (GRPO and its relatives; PPO with algorithm.advantage=gae).

python -m isoloss.recipes.grpo model.path=DIR data.train=PROMPTS.jsonl reward.function=math
torchrun --nproc_per_node 4 -m isoloss.recipes.grpo parallel.tp=2 model.path=DIR data.train=PROMPTS.jsonl
python -m isoloss.recipes.grpo --help                            # presets and keys
"""

import sys

from isoloss.recipes import launch


def main() -> int:
    return launch.main("grpo")


if __name__ == "__main__":
    sys.exit(main())
