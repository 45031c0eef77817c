"""Train language models by SFT and RL on Megatron-Core: the loss and gradients of a step depend on its samples alone.

isoloss.engine    a training step and the run around it: `Config`, `Engine`, `Loss`, `Sample`
isoloss.parallel  layouts, process groups, and the normalizer of losses
isoloss.models    model families, their weights, and conversion
isoloss.recipes   supervised fine-tuning and reinforcement learning from the command line
isoloss.tools     the other commands; `isoloss --help` lists all
"""

from isoloss.parallel.runtime.versions import VERSION as __version__

__all__ = ["__version__"]
