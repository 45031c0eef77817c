"""Starting and ending the process group of a rank. torchrun's environment is read here and nowhere else."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

OF_TORCHRUN = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks as torchrun announced them; (0, 1) without torchrun."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def visible_gpus() -> str | None:
    """The GPUs that the environment leaves this process, as CUDA reads it; None: all of them."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


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


def environment_without_torchrun() -> dict[str, str]:
    """This process's environment for a program that is not one of torchrun's ranks.

    With torchrun's variables such a program, if it uses torch.distributed, would look for its peers at our store.
    """
    return {
        key: value
        for key, value in os.environ.items()
        if key not in OF_TORCHRUN and not key.startswith("TORCHELASTIC_")
    }
