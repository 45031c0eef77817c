"""Prepare the process of a rank: its environment and the collections of its garbage. Imports no torch.

CUDA, NCCL and Transformer Engine read the environment at their first call.
"""

import gc

from isoloss.engine.config.schema import Config
from isoloss.parallel.runtime import environment

# For bit-equal repetitions: the same cuBLAS kernels, collectives that sum in one order (Megatron-Core's deterministic
# mode demands it; NVLink's switches add in any order), and attention of Transformer Engine without atomics.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


def prepare(config: Config) -> None:
    """Set the variables of this run, but none that the user has set.

    The recipes call this before they import torch. `Engine` calls it too, early enough if the GPU was not used before.
    """
    environment.add(variables(config))


def variables(config: Config) -> dict[str, str]:
    """Return the variables of this run: without a GPU none but those of train.deterministic."""
    values = dict(DETERMINISTIC) if config.train.deterministic else {}
    if config.train.device == "cpu" or not environment.may_have_gpus():
        return values
    if config.parallel.tp > 1:
        # Megatron-Core launches the communication of tensor parallelism before the products that hide it, and up to
        # Hopper relies on one hardware queue for this order. Without tensor parallelism one queue would only slow down.
        values["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if not config.lends_device_memory:
        # Rows, and so activations, differ in size. Segments that can grow do not fragment.
        values["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return values


class Garbage:
    """Collects Python's garbage after the steps that are multiples of `every`; 0: whenever Python likes.

    Python by itself would collect at different moments on different ranks, and all ranks wait for a rank that collects.
    Between `begin` and `end` objects older than `begin`, such as modules and the model, are never searched.
    """

    def __init__(self, every: int):
        self._every = every

    def begin(self) -> None:
        if self._every:
            gc.collect()
            gc.freeze()
            gc.disable()

    def after_step(self, step: int) -> None:
        if self._every and step % self._every == 0:
            gc.collect()

    def end(self) -> None:
        if self._every:
            gc.enable()
            gc.unfreeze()
