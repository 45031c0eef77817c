"""Numbers of a step over its micro-batches and ranks: sums, largest values, correlations; all in fp64."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.parallel import Mesh

MOMENTS = 5
# Of a variance, relative to the mean square: below it the difference of the two sums is mostly rounding.
SMALLEST_VARIANCE = 1e-12


def totals_of(consumed: Sequence[Tensor], sums: int, largest: int, mesh: Mesh) -> Tensor:
    """The sums of the first `sums` numbers of all micro-batches and ranks, and the largest of each of the others.

    consumed: of each micro-batch of this rank, [sums + largest] fp64; those others are not negative.
    Collectives: one all-gather over dp x context and one over pp, where only the last stage has something to add.
    """

    def reduced(parts: Sequence[Tensor]) -> Tensor:
        stacked = torch.stack(list(parts))
        return torch.cat([stacked[:, :sums].sum(0), stacked[:, sums:].amax(0)])

    zeros = torch.zeros(sums + largest, dtype=torch.float64, device=torch.cuda.current_device())
    totals = reduced([zeros, *consumed])
    for group in (mesh.dp_context, mesh.pp):
        rank_totals = [torch.empty_like(totals) for _ in range(group.size())]
        dist.all_gather(rank_totals, totals, group=group)
        totals = reduced(rank_totals)
    return totals


def largest_of(values_N: Tensor) -> Tensor:
    """The largest of values none of which is negative; 0 where there is none."""
    return values_N.amax().double() if len(values_N) else values_N.new_zeros((), dtype=torch.float64)


def moments_of(x_N: Tensor, y_N: Tensor) -> list[Tensor]:
    """Sums of x, y, x^2, y^2 and xy."""
    x_N, y_N = x_N.double(), y_N.double()
    return [values_N.sum() for values_N in (x_N, y_N, x_N.square(), y_N.square(), x_N * y_N)]


def correlation(moments: Sequence[float], count: int) -> float:
    """Pearson's, of the sums that `moments_of` gives; 1 where one of the two does not vary."""
    x, y, xx, yy, xy = (moment / max(count, 1) for moment in moments[:MOMENTS])
    variance_x, variance_y = xx - x * x, yy - y * y
    if variance_x <= SMALLEST_VARIANCE * xx or variance_y <= SMALLEST_VARIANCE * yy:
        return 1.0
    return (xy - x * y) / (variance_x * variance_y) ** 0.5
