"""Starting and ending the process group of a rank."""

import atexit
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from isoloss.parallel.runtime.environment import local_rank, rank_and_world


def choose_kernels(*, deterministic: bool) -> None:
    """What torch may choose on a GPU.

    Where cuBLAS divides a long sum among blocks, as in the gradient of a weight, their parts stay in fp32: rounded to
    bf16 on the way the gradient would depend on the division, and so on the layout.

    deterministic: repetitions are bit-equal, and an operation without a deterministic kernel is an error; with the
        variables that `isoloss.engine.instruments.startup` names.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if deterministic:
        torch.use_deterministic_algorithms(True)


def host_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A group over gloo, for what must not wait for a device, nor for the training's collectives.

    timeout: None: torch's. Collective over the world.
    """
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def own_host_group(parts: Sequence[list[int]]) -> dist.ProcessGroup:
    """As `host_group`, of the part of the world that has this rank. parts: the ranks of each. Collective over the
    world."""
    groups = [dist.new_group(ranks, backend="gloo") for ranks in parts]
    (own,) = [group for group in groups if isinstance(group, dist.ProcessGroup)]
    return own


def init_process_group(timeout: timedelta = timedelta(minutes=30)) -> None:
    """Join the world if this process has not yet: NCCL on GPUs, gloo on CPUs; one rank needs no rendezvous.

    On GPUs the world's communicator is made now, so that a network that does not work shows here. Other groups make
    theirs when they are first used, as without a device. A world that stays bound would split each of Megatron's many
    groups off itself at once, used or not, with all its ranks; single messages of a group would wait for each other;
    and a group with servers, which are not in the world, would never come about.

    A process that joined here leaves the world when it ends, unless it ends by an exception.
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
    if bound is not None and dist.group.WORLD is not None:
        dist.group.WORLD.bound_device_id = None
    atexit.register(_leave)


def _leave() -> None:
    """Destroy the process groups, of a process that ends.

    gloo's threads free the tensors of the last collective, and need Python for it: where they are alive while it
    finalizes, one process in four was seen to abort ("terminate called without an active exception").
    After an exception the other ranks may be gone, and to wait for them would keep torchrun from telling of it.
    """
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
