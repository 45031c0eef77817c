"""Supervised fine-tuning.

python -m isoloss.recipes.sft                                    # preset tiny: one rank
torchrun --nproc_per_node 4 -m isoloss.recipes.sft parallel.tp=2 parallel.ulysses=2 model.path=DIR data.train=FILE
python -m isoloss.recipes.sft --help                             # presets and keys
"""

import sys

from isoloss.engine.config.schema import Config
from isoloss.recipes import launch


def run(config: Config, run_name: str) -> None:
    # Its import takes seconds: help and a mistake in the command line do not wait for it.
    from isoloss.engine.sft.loop import train_sft

    train_sft(config, run_name)


def main() -> int:
    return launch.main("sft", Config, run)


if __name__ == "__main__":
    sys.exit(main())
