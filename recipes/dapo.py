"""Run DAPO: GRPO with clip-higher, dynamic sampling, overlong shaping, token-mean loss (Yu et al., arXiv 2503.14476).

python -m isoloss.recipes.dapo model.path=DIR data.train=PROMPTS.jsonl reward.function=math
torchrun --nproc_per_node 4 -m isoloss.recipes.dapo parallel.tp=2 model.path=DIR data.train=PROMPTS.jsonl
python -m isoloss.recipes.dapo --help                            # presets and keys
"""

import sys

from isoloss.recipes import launch


def main() -> int:
    return launch.main("dapo")


if __name__ == "__main__":
    sys.exit(main())
