"""Limit the memory of a GPU that the tensors of training may take. Imports no torch."""

from isoloss.engine.config.schema import Config

GIB = 2**30
# Memory in addition to the tensors: CUDA context and kernels, NCCL's buffers, cuBLAS's workspaces, and the allocator's
# gaps. An allowance, not a measurement.
MARGIN = 5.6 * GIB
# Memory that a server on the trainer's GPU keeps while it sleeps: CUDA context, NCCL buffers, CUDA graphs (2 GB in
# sgl-project/sglang#10217) and workspaces of its own. An allowance as well.
SLEEPING_SERVER = 5 * GIB


def room(config: Config, device_bytes: float) -> float:
    """Return the bytes that training's tensors may take at their peak. device_bytes: GPU memory by the driver."""
    return device_bytes - MARGIN - SLEEPING_SERVER * config.shares_device
