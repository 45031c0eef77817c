"""Run supervised fine-tuning.

python -m isoloss.recipes.sft                                    # preset tiny: one rank
torchrun --nproc_per_node 4 -m isoloss.recipes.sft parallel.tp=2 parallel.ulysses=2 model.path=DIR data.train=FILE
python -m isoloss.recipes.sft --help                             # presets and keys
"""

import sys

from isoloss.recipes import launch


def main() -> int:
    return launch.main("sft")


if __name__ == "__main__":
    sys.exit(main())
