"""Which layers each pipeline stage holds."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from isoloss.models.architecture import Architecture
from isoloss.models.flops import layer_flops, output_flops
from isoloss.parallel import Layout

# Where attention is weighed against matrices, and a windowed layer against one without: a usual length of a sequence.
TOKENS = 4096


def stage_layers(arch: Architecture, layout: Layout, chosen: Sequence[int] = ()) -> tuple[int, ...]:
    """Number of layers of each of the pp x vpp stages, in the order of the model: `chosen`, or split evenly by FLOPs.

    Rank r of the pipeline holds the stages r, pp + r, 2 pp + r ... An interleaved schedule runs one stage of every rank
    at a time and waits for the slowest, so it is the stages that are made even, not the sums of the ranks.
    """
    return tuple(chosen) if chosen else _split_evenly(arch, layout.pp * layout.vpp)


@cache
def _split_evenly(arch: Architecture, stages: int) -> tuple[int, ...]:
    return split_layers(layer_flops(arch, TOKENS), stages, output_flops(arch, TOKENS))


def split_layers(costs: Sequence[int], stages: int, last: int = 0) -> tuple[int, ...]:
    """Split layers into consecutive stages, each of at least one, so that the costliest stage costs the least.

    costs: cost of each layer.
    last: additional cost of the last stage.

    Of the best splits the most even one (least sum of squares) is taken, and of those the first in lexicographic order:
    the first stages also hold the embedding and, in 1F1B, the activations of most micro-batches. Exact: dynamic
    programming over (first layer, stages left).
    """
    total = len(costs)
    before = [0, *accumulate(costs)]

    def cost(first: int, end: int) -> int:
        return before[end] - before[first] + (last if end == total else 0)

    def ends(first: int, left: int) -> Sequence[int]:
        """Return the ends of the next stage that leave one layer for each stage after it."""
        return range(first + 1, total - left + 2) if left > 1 else (total,)

    @cache
    def costliest(first: int, left: int) -> int:
        if left == 1:
            return cost(first, total)
        return min(max(cost(first, end), costliest(end, left - 1)) for end in ends(first, left))

    limit = costliest(0, stages)

    @cache
    def best(first: int, left: int) -> tuple[int, tuple[int, ...]] | None:
        """(sum of squares, layers) of the stages left; None where one would exceed the limit."""
        if left == 0:
            return 0, ()
        candidates = []
        for end in ends(first, left):
            rest = best(end, left - 1) if cost(first, end) <= limit else None
            if rest is not None:
                candidates.append((cost(first, end) ** 2 + rest[0], (end - first, *rest[1])))
        return min(candidates, default=None)

    split = best(0, stages)
    assert split is not None
    return split[1]


def pipeline_layout(layers: Sequence[int]) -> list[list[str]]:
    """Return the contents of each stage, in the order of the model, for Megatron's `pipeline_model_parallel_layout`."""
    stages = [["decoder"] * count for count in layers]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages
