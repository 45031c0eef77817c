"""Access to the environment of this process, torchrun's variables included. No other module reads or sets it.

Imports no torch: variables of CUDA and NCCL must be set before the first call of either.
"""

import os
from collections.abc import Mapping

OF_TORCHRUN = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
# Files of NVIDIA's driver, also in a container; the second is of Windows.
DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # two names of one setting, the older last
_added: dict[str, str] = {}  # global, as the environment is


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the world size from torchrun's variables; (0, 1) without torchrun."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def torchrun_agent() -> int | None:
    """Return the id of torchrun's process that started this rank and may restart it; None without torchrun."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def variable(name: str) -> str | None:
    """Return the value of a variable that the configuration names; None if it is not set."""
    return os.environ.get(name)


def visible_gpus() -> str | None:
    """Return CUDA_VISIBLE_DEVICES, the GPUs that CUDA shows this process; None: all GPUs."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def may_have_gpus() -> bool:
    """Return True if torch may see a GPU. Does not call CUDA, whose first call reads the environment."""
    return visible_gpus() != "" and any(map(os.path.exists, DEVICE_FILES))


def add(variables: Mapping[str, str]) -> None:
    """Set the variables that the user has not set. A user's setting of the allocator counts under both of its names."""
    for name, value in variables.items():
        names = ALLOCATOR if name in ALLOCATOR else (name,)
        if not any(alias in os.environ for alias in names):
            os.environ[name] = _added[name] = value


def added() -> dict[str, str]:
    """Return the variables that `add` has set in this process and that have kept their values."""
    return {name: value for name, value in _added.items() if os.environ.get(name) == value}


def of_other_programs(hidden: str | None = None) -> dict[str, str]:
    """Return this process's environment for a program that is not one of torchrun's ranks.

    torchrun's variables are left out: with them, a program that uses torch.distributed would join this run's store. So
    are variables that were added for training.
    hidden: a further variable to leave out, such as one with a key.
    """
    left_out = {*OF_TORCHRUN, *added(), hidden}
    return {
        key: value for key, value in os.environ.items() if key not in left_out and not key.startswith("TORCHELASTIC_")
    }
