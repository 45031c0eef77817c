"""What ranks tell of their process groups, and what they exchange in shares of different sizes."""

import time

import torch
import torch.distributed as dist

from isoloss.parallel import Layout, Mesh

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
