"""Check that weights which several ranks hold are the same on all of them, bit for bit: a rank whose memory or step
went wrong is found before it spoils a checkpoint."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.models.kinds.mappings import Replicated
from isoloss.models.model import LocalWeight, Model
from isoloss.parallel.collectives import gather_objects, gather_shards

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DivergedError(RuntimeError):
    """Ranks hold different weights that should be the same."""


def check_replicas(model: Model, world: dist.ProcessGroup, after: str, adapter: Sequence[LocalWeight] = ()) -> None:
    """Raise DivergedError, on every rank, where this rank's weights differ from those of its replicas.

    world: a group of all ranks, on the host. after: the last step, for the message.
    adapter: weights of an adapter, which are compared as well.
    One pass over the weights. Collectives: an all-gather of 8 bytes a weight over dp x context, expert_dp, tp and etp,
    where these have several ranks, and one of objects over the world.
    """
    different: dict[int, str] = {}  # a weight of each rank that is not as in the others
    for everyone in gather_objects(differing(model, adapter), world):
        different |= everyone
    if not different:
        return
    ranks, weight = ", ".join(map(str, sorted(different))), different[min(different)]
    raise DivergedError(
        f"{after} the weights of rank{'s' * (len(different) > 1)} {ranks} are not those of the ranks that should hold "
        f"the same: {weight} is the first; start again with checkpoint.resume=true, and suspect the device of a rank "
        "that is named twice"
    )


def differing(model: Model, adapter: Sequence[LocalWeight] = ()) -> dict[int, str]:
    """Return the ranks of the world that differ, as far as this rank's groups show, and the first such weight."""
    owned = [*model.owned(), *adapter]
    sums = [checksum(each.parameter) for each in owned]
    found: dict[int, str] = {}
    for group, of_all in ((model.mesh.dp_context, False), (model.mesh.tp, True)):
        found |= _compare(group, owned, sums, expert=False, replicated=of_all)
    for group, of_all in ((model.mesh.expert_dp, False), (model.mesh.etp, True)):
        found |= _compare(group, owned, sums, expert=True, replicated=of_all)
    return found


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the bits as integers, 0-d int64, in any order of addition: one flipped bit changes it."""
    bits = tensor.detach().contiguous().view(INTEGERS[tensor.element_size()])
    return bits.sum(dtype=torch.int64)


def minority(values: Sequence[int]) -> list[int]:
    """Return the places of values that are not the most frequent; all places if two are as frequent."""
    (first, count), *others = Counter(values).most_common()
    if others and others[0][1] == count:
        return list(range(len(values)))
    return [place for place, value in enumerate(values) if value != first]


def _compare(
    group: dist.ProcessGroup, owned: Sequence[LocalWeight], sums: Sequence[Tensor], *, expert: bool, replicated: bool
) -> Mapping[int, str]:
    """Compare weights over a group. replicated: only weights that the ranks of the group do not divide."""
    mine = [
        (each.weight.name, of)
        for each, of in zip(owned, sums)
        if (each.weight.expert is not None) == expert
        and (not replicated or isinstance(each.weight.mapping, Replicated))
    ]
    if group.size() == 1 or not mine:
        return {}
    ranks = dist.get_process_group_ranks(group)
    found: dict[int, str] = {}
    of_ranks = torch.stack(gather_shards(torch.stack([of for _, of in mine]), group)).T.tolist()
    for (name, _), values in zip(mine, of_ranks):
        for place in minority(values):
            found.setdefault(ranks[place], name)
    return found
