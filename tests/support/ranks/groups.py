"""What ranks tell of their process groups, what stages plan to send, and shares of different sizes."""

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from isoloss.parallel import Layout, Mesh
from isoloss.parallel.mesh import reuse_world_group
from isoloss.parallel.schedule import Messages

AXES = ("tp", "pp", "ulysses", "ring", "context", "dp", "dp_context", "stage", "ep", "etp", "expert_dp")


def members(layout: Layout) -> dict[str, list[int]]:
    """By axis, the ranks of the group that this rank is in, in the order of the group."""
    mesh = Mesh.create(layout)
    return {axis: dist.get_process_group_ranks(getattr(mesh, axis)) for axis in AXES}


def uneven_shares() -> tuple[list[list[float]], list[float]]:
    """Rank r has r + 1 rows. What it gathers of all ranks; and the sum of what all ranks have for it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [each + 1 for each in range(world)]
    shares = [torch.empty(count, 2) for count in rows]
    dist.all_gather(shares, torch.full((rows[rank], 2), float(10 + rank)), group=dist.group.WORLD)
    own = torch.empty(rows[rank], 2)
    parts = [torch.full((count, 2), 100.0**rank * (1 + whose)) for whose, count in enumerate(rows)]
    dist.reduce_scatter(own, parts, group=dist.group.WORLD)
    return [share[:, 0].tolist() for share in shares], own[:, 1].tolist()


def last_rank_first() -> int:
    """This rank, told once all ranks behind it have ended theirs."""
    rank, behind = dist.get_rank(), dist.get_world_size() - 1 - dist.get_rank()
    time.sleep(0.2 * behind)
    return rank


def planned_messages(layout: Layout, rows: list[int]) -> tuple[list[list[list[int]]], bool]:
    """The shapes that this rank makes room for and sends, of a model of width 5: from the stage before it, to it, from
    the one behind it, to it. And whether all these channels refuse to send another shape."""
    mesh = Mesh.create(layout)
    config: Any = SimpleNamespace(
        hidden_size=5, virtual_pipeline_model_parallel_size=None, microbatch_group_size_per_vp_stage=layout.pp
    )

    def communicate(messages: Messages, shape: list[int] | None, *, prev: bool, receive: bool) -> list[int] | None:
        """The shape that is made room for, or that was sent; None where there are no more messages."""
        tensor = None if receive or shape is None else torch.empty(shape)
        send_next, send_prev = (None, tensor) if prev else (tensor, None)
        try:
            received = messages._communicate_shapes(send_next, send_prev, receive and prev, receive and not prev)
        except StopIteration:
            return None
        return received[not prev] if receive else shape

    channels, refused = [], True
    for prev in (True, False):
        messages, expected = Messages(mesh, config, rows), []
        while (shape := communicate(messages, None, prev=prev, receive=True)) is not None:
            expected.append(shape)
        sent = [communicate(messages, shape, prev=prev, receive=False) for shape in expected]
        more = communicate(messages, [1, 1, 5], prev=prev, receive=False)
        channels += [expected, [shape for shape in (*sent, more) if shape is not None]]
        if expected:
            try:
                communicate(Messages(mesh, config, rows), [7, 1, 5], prev=prev, receive=False)
                refused = False
            except AssertionError:
                pass
    return channels, refused


def for_scalars(layout: Layout) -> tuple[str | None, bool, list[str]]:
    """The axis whose group a stage shares, whether that of tp x dp x context is the world's own, and the axes over
    which sums of losses go."""
    mesh = Mesh.create(layout)
    shared = next((axis for axis in ("tp", "pp") if mesh.stage is getattr(mesh, axis)), None)
    world = reuse_world_group(mesh.megatron.tp_dp_cp) is dist.group.WORLD
    names = {id(mesh.dp_context): "dp_context", id(mesh.pp): "pp"}
    return shared, world, [names[id(group)] for group in mesh.loss_groups]


def leave_a_child() -> tuple[int, int]:
    """On rank 0 a process that sleeps, with all that this one has open; and the fork server."""
    child = os.fork() if dist.get_rank() == 0 else -1
    if child == 0:
        time.sleep(1000)
        os._exit(0)
    return child, os.getppid()


def meet_without(absent: int) -> None:
    """All ranks but one wait in a collective; that one sleeps. The last rank is stopped before."""
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if dist.get_rank() == absent:
        time.sleep(1000)
    dist.barrier()


def work_on_one_rank(seconds: float) -> int:
    """Rank 0 computes for so long, then a process of its own does; the others wait for it in a collective."""

    def compute() -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pass

    if dist.get_rank() == 0:
        compute()
        child = os.fork()
        if child == 0:
            compute()
            os._exit(0)
        os.waitpid(child, 0)
    dist.barrier()
    return dist.get_rank()
