"""Plan which data-parallel rank computes which sample, and in which micro-batch.

A pure function of its arguments, without a collective: the same on every rank that calls it. The plan decides which
rank works when, never the loss: the weights follow from counts of the whole step, however the step is divided.

Vectors: lengths_S tokens of each sample, costs_S forward FLOPs of each sample (any unit will do).
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import numpy as np
from numpy.typing import ArrayLike

from isoloss.models.architecture import Architecture
from isoloss.models.flops import met_parameters, output_parameters
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import trained_weights
from isoloss.parallel.ops.prefix_tree import PrefixTree

FULL = LoraConfig()  # fine-tuning without adapters
MicroBatches = tuple[tuple[tuple[int, ...], ...], ...]  # indices of samples, by dp rank and micro-batch


@dataclass(frozen=True)
class CostModel:
    """A third of the FLOPs of a step with one causal sequence of n tokens: linear * n + quadratic * n**2, and for
    layers with a sliding window of w tokens windowed * m * (2 n - m), with m = min(n, w): n**2 up to the window, a
    straight line beyond.

    Without adapters these are the FLOPs of the forward: the backward has two products for each of its.

    ValueError where a coefficient is negative or all are 0: the plan relies on longer samples costing more.
    """

    linear: float
    quadratic: float
    windowed: float = 0.0
    window: int = 0

    def __post_init__(self):
        coefficients = (self.linear, self.quadratic, self.windowed)
        if not (min(coefficients) >= 0 and 0 < sum(coefficients) < math.inf):
            raise ValueError(f"coefficients must be finite, >= 0 and not all 0: got {coefficients}")

    def cost(self, lengths_S: ArrayLike) -> np.ndarray:
        """Return the cost of each length, float64, of the shape of lengths_S."""
        lengths_S = np.asarray(lengths_S, dtype=np.float64)
        seen_S = np.minimum(lengths_S, self.window)
        windowed_S = self.windowed * seen_S * (2 * lengths_S - seen_S)
        return self.linear * lengths_S + self.quadratic * lengths_S**2 + windowed_S

    def cost_of_spans(self, spans: Sequence[tuple[int, int]]) -> float:
        """Return the summed cost of tokens [start, stop) of sequences; each attends to all tokens before it."""
        starts, stops = zip(*spans) if spans else ((), ())
        return float(self.cost(stops).sum() - self.cost(starts).sum())

    @classmethod
    def of(cls, arch: Architecture, lora: LoraConfig = FULL) -> "CostModel":
        """Count the FLOPs of a model (models/flops.py): linear ones of matrices and of linear attention, quadratic and
        windowed ones of attention.

        The output projection is counted at every token, as is usual for MFU, though only labeled positions compute it:
        masked prompts are a little cheaper than this says. Of a matrix under adapters (lora.rank above 0) the backward
        computes no gradient: 4 FLOPs a token and number in place of 6, which the adapter's own numbers take.
        """
        parameters = sum(parameters for _, parameters in met_parameters(arch)) + output_parameters(arch)
        if lora.rank > 0:
            of_adapter = met_parameters(arch, trained_weights(arch, lora))
            parameters = parameters * 2 / 3 + sum(factor for _, factor in of_adapter)
        attentions = [layer.attention for layer in arch.layers]
        windows = {attention.window for attention in attentions if attention.window}
        assert len(windows) <= 1, "config.json gives one window for all layers that have one"
        return cls(
            linear=2.0 * parameters + sum(attention.token_flops for attention in attentions),
            quadratic=sum(attention.pair_flops for attention in attentions if not attention.window),
            windowed=sum(attention.pair_flops for attention in attentions if attention.window),
            window=max(windows, default=0),
        )


@dataclass(frozen=True)
class _Unit:
    """Samples that stay together, as one: computed tokens, at most max_tokens, and their cost."""

    samples: tuple[int, ...]
    tokens: int
    cost: float


@dataclass(frozen=True)
class Plan:
    """A division of samples among ranks, micro-batches and rows.

    micro_batches[dp_rank][m]: indices of the samples in micro-batch m of that rank; () where none are left.
    trees[dp_rank][m]: the row that computes them, as pieces; the samples are its documents, in the same order.

    Every rank has the same number of micro-batches, so that no schedule waits for a rank that has finished. On each
    rank they run from the most to the least costly: the m-th are alike across ranks, and empty ones come last.
    """

    micro_batches: MicroBatches
    trees: tuple[tuple[PrefixTree, ...], ...]

    def __post_init__(self):
        assert len({len(rank) for rank in self.micro_batches}) == 1, "ranks with different numbers of micro-batches"

    @classmethod
    def apart(cls, micro_batches: MicroBatches, lengths: Sequence[int]) -> "Plan":
        """Make a plan whose samples share no computation. lengths: tokens of every sample."""
        trees = [[PrefixTree.apart([lengths[i] for i in m]) for m in rank] for rank in micro_batches]
        return cls(micro_batches, tuple(map(tuple, trees)))

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches[0])


def make_plan(
    lengths_S: Sequence[int] | np.ndarray,
    dp_size: int,
    max_tokens: int,
    cost_model: CostModel,
    multiple_of: int = 1,
    shared: Mapping[tuple[int, ...], int] | None = None,
    stages: int = 1,
) -> Plan:
    """Place every sample once: ranks of even cost, micro-batches of even cost within `max_tokens` tokens.

    No sample is ever split: one that is longer than `max_tokens` has a micro-batch to itself. Groups of samples in
    `shared` stay together in parts, as large as leaves the ranks even: of several sizes, the one is taken whose
    costliest rank costs least, its costliest micro-batch counted once more for each further of the `stages` of a
    pipeline, which it fills and drains. Without parts is one of them, so groups never make it cost more.

    shared: number of tokens that a group's samples begin with, by group: counted once, though `trees` share none.

    Samples go to ranks first, since the slowest rank sets the time of the step. Ranks of equal cost may hold different
    numbers of tokens and so need different numbers of micro-batches: all get the largest number any rank needs, rounded
    up to `multiple_of` (interleaved pipelines: the pipeline size), and spread their samples over all of them.

    Depends on the multiset of lengths alone: permuting the samples permutes the indices, up to swaps of equal lengths.
    ValueError on bad arguments.
    """
    lengths_S = _checked_lengths(lengths_S)
    if min(dp_size, multiple_of, max_tokens) < 1:
        raise ValueError(f"{dp_size=}, {multiple_of=} and {max_tokens=} must be at least 1")
    # Stable, so equal lengths are taken by index. Cost grows with length: one order serves both.
    order_S = np.argsort(-lengths_S, kind="stable").tolist()
    costs = cost_model.cost(lengths_S).tolist()
    lengths = np.minimum(lengths_S, max_tokens).tolist()  # a sample that fills a micro-batch is alone in it
    alone = [_Unit((i,), lengths[i], costs[i]) for i in order_S]
    divisions = [alone]
    if shared:
        divisions = _divisions(alone, shared, lengths_S.tolist(), dp_size, max_tokens, cost_model)
    placed = [_place(units, dp_size, max_tokens, multiple_of, stages) for units in divisions]
    _, micro_batches = min(placed, key=lambda step: (step[0], len(step[1][0])))
    return Plan.apart(micro_batches, lengths_S.tolist())


# The costliest part of a group, in shares of a rank's work.
LARGEST_PARTS = (math.inf, 1.0, 1 / 2, 1 / 4, 1 / 8)


def _divisions(
    alone: Sequence[_Unit],
    shared: Mapping[tuple[int, ...], int],
    lengths: Sequence[int],
    dp_size: int,
    max_tokens: int,
    cost_model: CostModel,
) -> Iterator[list[_Unit]]:
    """Yield divisions of the groups into ever smaller parts, and last every sample alone. alone: the longest first."""
    of_sample = {unit.samples[0]: unit for unit in alone}
    grouped = {i for samples in shared for i in samples}
    rest = [unit for unit in alone if unit.samples[0] not in grouped]
    beginnings = cost_model.cost([*shared.values()]).tolist()
    share, before = math.inf, None
    for largest in LARGEST_PARTS:
        limit = math.inf if largest == math.inf else largest * share
        units = list(rest)
        for (samples, tokens), beginning in zip(shared.items(), beginnings):
            members = sorted(samples, key=lambda i: (-lengths[i], i))
            units += _parts(members, tokens, beginning, of_sample, lengths, max_tokens, limit)
        share = sum(unit.cost for unit in units) / dp_size if share == math.inf else share
        if units != before:
            yield units
        before = units
    yield list(alone)


def _parts(
    members: Sequence[int],
    tokens: int,
    beginning: float,
    of_sample: Mapping[int, _Unit],
    lengths: Sequence[int],
    max_tokens: int,
    limit: float,
) -> list[_Unit]:
    """Divide the members of a group into the fewest parts of even cost within both limits. members: longest first.

    tokens, beginning: number of tokens that they share, and the cost of these.
    """
    for count in range(1, len(members)):
        parts = assign_ranks(range(len(members)), [of_sample[i].cost - beginning for i in members], count)
        units = []
        for part in parts:
            samples = tuple(members[k] for k in part)
            behind = sum(lengths[i] - tokens for i in samples)
            cost = beginning + sum(of_sample[i].cost - beginning for i in samples)
            units.append(_Unit(samples, tokens + behind, cost))
        if all(len(u.samples) == 1 or (u.tokens <= max_tokens and u.cost <= limit) for u in units):
            return [of_sample[u.samples[0]] if len(u.samples) == 1 else u for u in units]
    return [of_sample[i] for i in members]


def _place(
    units: Sequence[_Unit], dp_size: int, max_tokens: int, multiple_of: int, stages: int
) -> tuple[float, MicroBatches]:
    """Return the cost of the step (`make_plan`), and the micro-batches of its plan."""
    by_cost = sorted(units, key=lambda unit: (-unit.cost, -unit.tokens, unit.samples))
    tokens, costs = [unit.tokens for unit in by_cost], [unit.cost for unit in by_cost]
    ranks = assign_ranks(range(len(by_cost)), costs, dp_size)
    for rank in ranks:
        rank.sort(key=lambda u: (-tokens[u], u))
    packed = [_pack(rank, tokens, max_tokens) for rank in ranks]
    needed = max(1, max(len(bins) for bins in packed))
    count = math.ceil(needed / multiple_of) * multiple_of
    plan, step = [], 0.0
    for rank, bins in zip(ranks, packed):
        # Spreading by cost wastes tokens where the budget is tight; the packing that was found always fits.
        spread = _spread(rank, tokens, costs, count, max_tokens) or bins + [[]] * (count - len(bins))
        spread.sort(key=lambda units: -sum(costs[u] for u in units))
        plan.append(tuple(tuple(i for u in units for i in by_cost[u].samples) for units in spread))
        step = max(step, sum(costs[u] for u in rank) + (stages - 1) * sum(costs[u] for u in spread[0]))
    return step, tuple(plan)


def assign_ranks(order_S: Sequence[int], costs_S: Sequence[float], dp_size: int) -> list[list[int]]:
    """Give each sample of order_S, by falling cost, to the rank of least cost so far (ties: lowest rank).

    Source: Graham 1969, longest processing time first. No rank exceeds the mean by more than the last sample it got,
    usually a short one. Karmarkar-Karp comes closer to the mean by less than 1e-4, for more than ten times the CPU:
    benchmarks/token_balance.py measures both.
    """
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    heap = [(0.0, rank) for rank in range(dp_size)]
    for i in order_S:
        load, rank = heap[0]
        ranks[rank].append(i)
        heapreplace(heap, (load + costs_S[i], rank))
    return ranks


def imbalance(plan: Plan, lengths_S: ArrayLike, cost_model: CostModel) -> float:
    """Return the costliest rank's cost over the mean, shared tokens counted per sample; 1.0 without samples."""
    costs_S = cost_model.cost(lengths_S).tolist()
    loads = [sum(costs_S[i] for micro_batch in rank for i in micro_batch) for rank in plan.micro_batches]
    total = sum(loads)
    return float(max(loads) * len(loads) / total) if total > 0 else 1.0


def _checked_lengths(lengths_S: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return an int64 vector of the lengths, each at least 1."""
    lengths_S = np.asarray(lengths_S)
    if lengths_S.size == 0:
        lengths_S = lengths_S.astype(np.int64)
    if lengths_S.ndim != 1 or not np.issubdtype(lengths_S.dtype, np.integer) or (lengths_S < 1).any():
        raise ValueError(f"lengths must be a vector of integers of at least 1, got {lengths_S.dtype} {lengths_S.shape}")
    return lengths_S.astype(np.int64)


def _pack(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put each sample into the fullest bin that has room for it, else into a new one (best-fit decreasing).

    Never more than 11/9 of the optimal number of bins, plus 4 (Johnson et al. 1974).
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending, so that the first that fits is the fullest
    for i in order:
        at = bisect_left(room, (lengths[i], 0))
        if at < len(room):
            left, b = room.pop(at)
        else:
            left, b = max_tokens, len(bins)
            bins.append([])
        bins[b].append(i)
        insort(room, (left - lengths[i], b))
    return bins


def _spread(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], count: int, max_tokens: int
) -> list[list[int]] | None:
    """Put samples, the longest first, each into the cheapest of `count` bins with room; None if one fits nowhere."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [max_tokens] * count
    cheapest = [(0.0, b) for b in range(count)]  # (cost, bin)
    # Bins without room for the sample at hand, by (-tokens left, cost, bin). Lengths only fall, so a bin that comes
    # back stays until it is given a sample again: n log(count) in all, however tight the budget.
    waiting: list[tuple[int, float, int]] = []
    for i in order:
        while waiting and -waiting[0][0] >= lengths[i]:
            _, load, b = heappop(waiting)
            heappush(cheapest, (load, b))
        while cheapest and room[cheapest[0][1]] < lengths[i]:
            load, b = heappop(cheapest)
            heappush(waiting, (-room[b], load, b))
        if not cheapest:
            return None
        load, b = cheapest[0]
        heapreplace(cheapest, (load + costs[i], b))
        bins[b].append(i)
        room[b] -= lengths[i]
    return bins
