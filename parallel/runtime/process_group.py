"""Starting and ending the process group of a rank."""

import atexit
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from isoloss.parallel.runtime.environment import local_rank, rank_and_world


def choose_kernels(*, deterministic: bool) -> None:
    """Restrict the kernels that torch may choose on a GPU.

    deterministic: True to make repetitions bit-equal, with the variables that `isoloss.engine.instruments.startup`
        names; an operation without a deterministic kernel is then an error.
    """
    # cuBLAS may divide a long sum among blocks, as in the gradient of a weight. Partial sums that are rounded to bf16
    # would make the gradient depend on the division, and so on the layout.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if deterministic:
        torch.use_deterministic_algorithms(True)


def host_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Create a group over gloo, whose messages wait neither for a device nor for the training's collectives.

    timeout: time limit of a collective; None: torch's default. Collective over the world.
    """
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def own_host_group(parts: Sequence[list[int]]) -> dist.ProcessGroup:
    """Create a `host_group` for each part of the world, and return that of this rank.

    parts: ranks of each part; every rank is in one part. Collective over the world.
    """
    groups = [dist.new_group(ranks, backend="gloo") for ranks in parts]
    (own,) = [group for group in groups if isinstance(group, dist.ProcessGroup)]
    return own


def init_process_group(timeout: timedelta = timedelta(minutes=30)) -> None:
    """Join the world, over NCCL on GPUs and gloo on CPUs, unless this process has joined; one rank needs no rendezvous.

    A process that joined here leaves the world at exit, unless it ends by an exception. Collective over the world.
    """
    if dist.is_initialized():
        return
    backend, bound = "gloo", None
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
        backend, bound = "nccl", torch.device("cuda", local_rank())
    if rank_and_world()[1] == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, device_id=bound)
    else:
        dist.init_process_group(backend, timeout=timeout, device_id=bound)
    # `device_id` creates the world's communicator now, so that a broken network fails here. Afterwards the world is
    # unbound, and other groups create communicators at first use. A bound world would split off each of Megatron's
    # many groups at once, used or not, with all ranks; single messages of a group would wait for each other; and a
    # group with servers, which are not in the world, could not be formed.
    if bound is not None and dist.group.WORLD is not None:
        dist.group.WORLD.bound_device_id = None
    atexit.register(_leave)


def _leave() -> None:
    """Destroy the process groups at the exit of a process, unless it ends by an exception.

    Threads of gloo free the tensors of the last collective, and need Python for it. With such threads alive while
    Python finalizes, one process in four aborted ("terminate called without an active exception").
    After an exception, other ranks may be gone, and a wait for them would keep torchrun from reporting the exception.
    """
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
