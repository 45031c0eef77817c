"""The environment of this process, torchrun's variables among it, is read here and nowhere else. Imports no torch."""

import os

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


def without_torchrun() -> dict[str, str]:
    """This process's environment for a program that is not one of torchrun's ranks.

    With torchrun's variables such a program, if it uses torch.distributed, would look for its peers at our store.
    """
    return {
        key: value
        for key, value in os.environ.items()
        if key not in OF_TORCHRUN and not key.startswith("TORCHELASTIC_")
    }
