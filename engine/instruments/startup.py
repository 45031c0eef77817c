"""What has to be in the environment before the first call of CUDA, NCCL or Transformer Engine. Imports no torch."""

from isoloss.engine.config.schema import Config
from isoloss.parallel.runtime import environment

# Bit-equal repetitions: the same kernels of cuBLAS, sums of a collective in one order (as Megatron-Core's own
# deterministic mode asks for; NVLink's switches add in any order), and attention of Transformer Engine without atomics.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


def prepare(config: Config) -> None:
    """Set what this run needs; what the user has set stays.

    The recipes call it before they import torch. Who builds an Engine alone has it called there, which is early enough
    where nothing has used the GPU yet.
    """
    environment.add(variables(config))


def variables(config: Config) -> dict[str, str]:
    """On a GPU and, but for train.deterministic, only there."""
    wanted = dict(DETERMINISTIC) if config.train.deterministic else {}
    if config.train.device == "cpu" or not environment.may_have_gpus():
        return wanted
    if config.parallel.tp > 1:
        # Megatron-Core launches the communication of tensor parallelism before the products that hide it, and counts on
        # the GPU to begin it in that order, up to Hopper. Without tensor parallelism one queue would only hinder.
        wanted["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if not config.lends_device_memory:
        # Rows differ in length, and so do their activations: segments that grow leave no gaps between them.
        wanted["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return wanted
