"""The environment of this process, torchrun's variables among it, is read and set here and nowhere else.

Imports no torch: what CUDA and NCCL read of it has to be there before their first call.
"""

import os
from collections.abc import Mapping

OF_TORCHRUN = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
# Of NVIDIA's driver, also in a container; the second under Windows.
DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # two names of one setting, the old one last
_added: dict[str, str] = {}  # like the environment itself, of the process


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks as torchrun announced them; (0, 1) without torchrun."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def torchrun_agent() -> int | None:
    """The process of torchrun that started this rank, and starts it again where it may; None without torchrun."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def variable(name: str) -> str | None:
    """The value of a variable that the user named for it; None where it is not set."""
    return os.environ.get(name)


def visible_gpus() -> str | None:
    """The GPUs that the environment leaves this process, as CUDA reads it; None: all of them."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def may_have_gpus() -> bool:
    """Whether torch may see a GPU, without asking CUDA, which would read the environment now."""
    return visible_gpus() != "" and any(map(os.path.exists, DEVICE_FILES))


def add(variables: Mapping[str, str]) -> None:
    """Set those that the user has not set. A user's setting of the allocator stays whole, under either of its names."""
    for name, value in variables.items():
        names = ALLOCATOR if name in ALLOCATOR else (name,)
        if not any(each in os.environ for each in names):
            os.environ[name] = _added[name] = value


def added() -> dict[str, str]:
    """What `add` has set in this process, and what is still so."""
    return {name: value for name, value in _added.items() if os.environ.get(name) == value}


def of_other_programs() -> dict[str, str]:
    """This process's environment for a program that is not one of torchrun's ranks.

    With torchrun's variables such a program, if it uses torch.distributed, would look for its peers at our store; and
    what was added for training is not meant for it.
    """
    ours = added()
    return {
        key: value
        for key, value in os.environ.items()
        if key not in OF_TORCHRUN and not key.startswith("TORCHELASTIC_") and key not in ours
    }
