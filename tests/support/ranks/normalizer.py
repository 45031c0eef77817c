"""GlobalLossNormalizer on several ranks, and a reference without weights: each mode as its definition reads."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from isoloss.parallel import GlobalLossNormalizer, Layout, Mesh
from isoloss.parallel.aggregation import MODES

NORM_LENGTH = 7
# Uneven: a fully masked sequence, a prompt (2) without a valid token, one (0) whose sequences are far apart.
MASKS = [
    torch.tensor(m)
    for m in ([0, 1, 1, 1, 0, 1], [0, 1], [0, 0, 0, 0], [0, 1, 1], [0], [0, 0, 1, 1, 1, 1, 1, 0, 1], [0, 0, 1], [0, 1])
]
GROUPS = [0, 1, 2, 1, 3, 3, 0, 0]
NUM_GROUPS = 4
# The same masks as cuts of six trajectories, within their prompts; two have no valid token.
SEQUENCES = [0, 1, 2, 1, 3, 4, 0, 5]
NUM_SEQUENCES = 7  # one more than there are


def reference_loss(mode, losses, masks, groups, num_groups, count_fully_masked) -> float:
    """The loss of a step by the table of modes: means of means, nothing rearranged."""
    sums = np.array([(loss * mask).sum() for loss, mask in zip(losses, masks)])
    n = np.array([mask.sum() for mask in masks])
    sequences = len(n) if count_fully_masked else (n > 0).sum()
    sums_P, n_P = (np.array([x[np.array(groups) == g].sum() for g in range(num_groups)]) for x in (sums, n))
    prompts = num_groups if count_fully_masked else (n_P > 0).sum()
    return {
        "token-mean": lambda: sums.sum() / n.sum(),
        "seq-mean-token-mean": lambda: (sums[n > 0] / n[n > 0]).sum() / sequences,
        "seq-mean-token-sum": lambda: sums.sum() / sequences,
        "seq-mean-token-sum-norm": lambda: sums.sum() / sequences / NORM_LENGTH,
        "prompt-mean-token-mean": lambda: (sums_P[n_P > 0] / n_P[n_P > 0]).sum() / prompts,
        "sum": lambda: sums.sum(),
    }[mode]()


def norm_length(mode: str) -> int | None:
    return NORM_LENGTH if mode == "seq-mean-token-sum-norm" else None


def weights_of(mode, indices: Sequence[int], group, count_fully_masked, **placement):
    """Weights of some of MASKS (whole, or slices given by `placement["slices"]`) and the counts."""
    slices, cut = placement.pop("slices", None), placement.pop("cut", False)
    normalizer = GlobalLossNormalizer(
        mode, group, norm_length=norm_length(mode), count_fully_masked=count_fully_masked, **placement
    )
    masks = [MASKS[i] if slices is None else MASKS[i][slices[i]] for i in indices]
    ids = {"sequence_ids": [SEQUENCES[i] for i in indices], "num_sequences": NUM_SEQUENCES} if cut else {}
    return normalizer.weights(masks, [GROUPS[i] for i in indices], num_groups=NUM_GROUPS, **ids)


# Mode, count_fully_masked, and whether the samples are cuts of SEQUENCES.
CASES = [(mode, fully, cut) for mode in MODES for fully in (False, True) for cut in (False, True)]


def replicated(layout: str, share_of: Sequence[Sequence[int]]):
    """Of each of CASES, for this rank's share of the samples by its dp rank: {sample: weights}, counts, and over which
    groups the collectives went. Masks are whole."""
    return _of_every_case(Mesh.create(Layout.parse(layout)), share_of)


def sharded(layout: str, share_of: Sequence[Sequence[int]]):
    """The same with this context rank's slice of every mask; some slices are empty."""
    mesh = Mesh.create(Layout.parse(layout))
    degree, rank = mesh.context.size(), mesh.context.rank()
    slices = [slice(len(mask) * rank // degree, len(mask) * (rank + 1) // degree) for mask in MASKS]
    return _of_every_case(mesh, share_of, mask_placement="sharded", sp_group=mesh.context, slices=slices)


def _of_every_case(mesh: Mesh, share_of: Sequence[Sequence[int]], **placement):
    mine = share_of[mesh.dp.rank()]
    names = {id(mesh.dp): "dp", id(mesh.context): "context"}
    results = {}
    for mode, count_fully_masked, cut in CASES:
        with counted_collectives() as called:
            weights, counts = weights_of(mode, mine, mesh.dp, count_fully_masked, cut=cut, **placement)
        results[mode, count_fully_masked, cut] = (
            dict(zip(mine, weights)),
            counts,
            [names.get(id(group), "other") for group in called],
        )
    return results


class counted_collectives:
    """The groups of every collective that is called inside, in order."""

    NAMES = (
        "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
        "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast", "broadcast_object_list", "gather", "scatter",
        "barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv",
    )  # fmt: skip

    def __enter__(self) -> list:
        self.called: list = []
        self.originals = {name: getattr(dist, name) for name in self.NAMES}
        for name, original in self.originals.items():
            setattr(dist, name, self._counting(original))
        return self.called

    def __exit__(self, *exc) -> None:
        for name, original in self.originals.items():
            setattr(dist, name, original)

    def _counting(self, original):
        def wrapped(*args, **kwargs):
            self.called.append(kwargs.get("group"))
            return original(*args, **kwargs)

        return wrapped
