"""How much of a GPU the tensors of training may take. Imports no torch."""

from isoloss.engine.config import Config

GIB = 2**30
# What comes on top of the tensors: CUDA context and kernels, NCCL's buffers, cuBLAS's workspaces, and the allocator's
# gaps. An allowance, not a measurement.
MARGIN = 5.6 * GIB
# What a server on the trainer's GPU keeps while it sleeps: its own CUDA context and NCCL buffers, CUDA graphs (2 GB in
# sgl-project/sglang#10217) and workspaces. An allowance as well.
SLEEPING_SERVER = 5 * GIB


def room(config: Config, device_bytes: float) -> float:
    """Bytes that the tensors of training may take at their peak. device_bytes: of the GPU, as the driver shows them."""
    return device_bytes - MARGIN - SLEEPING_SERVER * config.shares_device
