"""Starting the process group of a rank."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from isoloss.parallel.environment import local_rank, rank_and_world


def use_deterministic_algorithms() -> None:
    """Bit-equal repetitions: torch raises where it has no deterministic kernel. Before the first CUDA call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
    torch.use_deterministic_algorithms(True)


def init_process_group(timeout: timedelta = timedelta(minutes=30)) -> None:
    """Join the world if this process has not yet: NCCL on GPUs, gloo on CPUs; one rank needs no rendezvous."""
    if dist.is_initialized():
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
        backend = "nccl"
    if rank_and_world()[1] == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
