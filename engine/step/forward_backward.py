"""One pass over the samples of a step: plan, weights, packed micro-batches, schedule, metrics. SFT and RL share it.

Shape suffixes: T tokens of one sample, R of this rank's slice of a packed row, N labeled positions on this rank,
A aggregations of the loss.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, islice
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isoloss.engine.batching.packing import PackedBatch, pack
from isoloss.engine.batching.plan import Placement
from isoloss.engine.batching.prefixes import Piece
from isoloss.engine.batching.sample import Sample
from isoloss.engine.instruments import watchdog
from isoloss.engine.instruments.profiling import Stopwatch, phase
from isoloss.engine.step.losses import Fields, Loss, TokenInputs
from isoloss.engine.step.moe_balancing import reduce_losses, routed_tokens
from isoloss.models.mcore.gpt import forward_row
from isoloss.models.mcore.moe.dispatch import Bound
from isoloss.models.mcore.moe.experts import RoutedRow
from isoloss.models.mcore.moe.router_losses import RouterLoss, RouterLosses
from isoloss.models.model import Model
from isoloss.parallel import Mesh
from isoloss.parallel.normalizer import GlobalLossNormalizer, StepCounts, count_tokens
from isoloss.parallel.schedule import run_schedule
from isoloss.parallel.sequence import row_length

# How far the consumed weights may be from their closed form: rounding of fp64 and of fp32 weights.
CANARY_TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}
MOMENTS = 5  # of two variables: see `moments_of`
# Of a variance, relative to the mean square: below it the difference of the two sums is mostly rounding.
SMALLEST_VARIANCE = 1e-12

Head = Callable[[PackedBatch, Tensor], Tensor]


class CanaryError(RuntimeError):
    """The loss head did not consume the weights that the counts promise: the loss of this step is not to be trusted."""


class MicroBatches(Sequence[PackedBatch]):
    """Packed when they are asked for, one before its turn, so that a step needs the memory of few of them, however many
    there are."""

    def __init__(self, length: int, pack_one: Callable[[int], PackedBatch]):
        self._length, self._pack_one = length, pack_one

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        return self._pack_one(range(self._length)[index])


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of this rank, and what the step holds over all ranks.

    rows: tokens of each micro-batch's whole row, with padding.
    counts: for each aggregation of the loss.
    lengths: tokens of every sample of the step.
    spans: of each dp rank, where the pieces that it computes begin and end in their samples.
    cost, total_cost: of what this rank computes, and all: forward FLOPs.
    """

    micro_batches: Sequence[PackedBatch]
    rows: tuple[int, ...]
    counts: tuple[StepCounts, ...]
    lengths: tuple[int, ...]
    spans: Sequence[Sequence[tuple[int, int]]]
    cost: float = 0.0
    total_cost: float = 0.0

    @property
    def total_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def computed_tokens(self) -> int:
        return sum(stop - start for of_rank in self.spans for start, stop in of_rank)


@dataclass(frozen=True)
class StepMetrics:
    """Over all ranks.

    loss: the number that was differentiated.
    magnitude: the sum of the absolute values of all that was added up to it, which its rounding error is relative to.
    weight_sum: of the first term's weights, as consumed.
    terms: each term's sum, by name, without its coefficient; those of the routers too, which are part of the loss.
    observed: means over the valid tokens, and what else the loss asked for of them.
    valid_tokens: targets.
    total_tokens: tokens without padding. computed_tokens: the same, what samples share counted once.
    micro_batches: of each rank.
    seconds: that forward and backward took, where they were timed.
    lost: rows for which messages between experts had no room, of the rank that lost most; above 0 the step is worth
        nothing.
    reruns: how often `Engine.train_step` ran the step again for that; None without a bound.
    busy_seconds: that this rank's device was at its micro-batches, before it waits for other ranks' sums.
    cost, total_cost: of what this rank computed, and all: forward FLOPs.
    """

    loss: float
    magnitude: float
    weight_sum: float
    valid_tokens: int
    total_tokens: int
    computed_tokens: int
    sequences: int
    micro_batches: int
    seconds: float = 0.0
    terms: Mapping[str, float] = field(default_factory=dict)
    observed: Mapping[str, float] = field(default_factory=dict)
    lost: int = 0
    reruns: int | None = None
    busy_seconds: float = 0.0
    cost: float = 0.0
    total_cost: float = 0.0


def prepare_step(
    samples: Sequence[Sample], loss: Loss, placement: Placement, mesh: Mesh, device: torch.device
) -> StepBatch:
    """Count and weigh this rank's share of `samples`; packing waits for its turn.

    samples: all of the step, on every rank; of those that are placed elsewhere an outline will do.
    Collectives: one all-reduce of int64 counts over dp x context, whatever the number of micro-batches and
    aggregations. Context ranks have the same samples; a group of dp alone would be made for these counts only.
    """
    mine = placement.plan.micro_batches[mesh.dp.rank()]
    order = [index for micro_batch in mine for index in micro_batch]
    masks = [samples[index].mask_T for index in order]
    # Numbered without gaps, from all samples of the step: the same numbers on every rank.
    number_of = {group: number for number, group in enumerate(dict.fromkeys(sample.group for sample in samples))}
    group_ids = [number_of[samples[index].group] for index in order]
    by_prompt = any(aggregation.by_prompt for aggregation in loss.aggregations)
    prompts = {"group_ids": group_ids, "num_groups": len(number_of)} if by_prompt else {}
    counts = count_tokens(masks, mesh.dp_context, counted=mesh.context.rank() == 0, **prompts)
    weighed = [GlobalLossNormalizer(mode, mesh.dp).weights(masks, counts=counts) for mode in loss.aggregations]
    weights_of = {index: torch.stack(modes) for index, *modes in zip(order, *(weights for weights, _ in weighed))}
    lengths = tuple(len(sample) for sample in samples)
    start_of = [0, *accumulate(lengths)]

    names = sorted(samples[0].fields) if samples else []

    def pack_one(index: int) -> PackedBatch:
        m = mine[index]
        row = [samples[i] for i in m], [weights_of[i] for i in m], [start_of[i] for i in m]
        packed = pack(*row, mesh, device, names, len(loss.aggregations), own_pieces[index])
        return replace(packed, longest=longest[index])

    def rows_of(pieces: Sequence[Sequence[Piece]]) -> tuple[int, ...]:
        return tuple(row_length([len(piece) for piece in m], mesh) for m in pieces)

    own_pieces = placement.pieces[mesh.dp.rank()]
    rows = longest = rows_of(own_pieces)
    if mesh.layout.ep > 1:  # ranks that share experts may have longer rows
        longest = [max(ranks) for ranks in zip(*map(rows_of, placement.pieces))]
    spans = [[(piece.start, piece.stop) for m in of_rank for piece in m] for of_rank in placement.pieces]
    return StepBatch(MicroBatches(len(mine), pack_one), rows, tuple(counts for _, counts in weighed), lengths, spans)


def run_step(
    model: Model,
    batch: StepBatch,
    loss: Loss,
    *,
    router_losses: RouterLosses | None = None,
    dispatch_bound: float | None = None,
    forward_only: bool = False,
) -> StepMetrics:
    """Forward and backward of every micro-batch; gradients accumulate unreduced in the chunks' buffers.

    router_losses: what the routers add to the loss (`moe_balancing.start`).
    dispatch_bound: of messages between experts; the caller looks at `lost`.
    Raises CanaryError if the weights consumed by the loss head, or by the routers, are not those of the counts.
    Collectives: the model's and the loss's; one all-gather over dp x context and one over pp of a few numbers, and a
    pair of all-reduces with router losses; with a bound, an all-reduce of one number over tp.
    """
    lost = None if dispatch_bound is None else torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    bound = partial(_bound, model.mesh, dispatch_bound, lost)
    forward, of_loss, busy = partial(_forward, model, router_losses, bound), partial(_loss, model, loss), Stopwatch()
    consumed = run_schedule(
        model.mesh, model.chunks, batch.micro_batches, batch.rows, forward, of_loss, forward_only=forward_only
    )
    busy.stop()
    if lost is not None and model.mesh.tp.size() > 1:  # whose ranks have different tokens, and else the same numbers
        dist.all_reduce(lost, dist.ReduceOp.MAX, group=model.mesh.tp)
    *summed, largest = StepTotals.sizes(loss)
    flat = totals_of(consumed, sum(summed), largest, model.mesh, lost)
    totals = StepTotals.read(loss, flat.cpu().tolist())  # the host waits for the device here, once a step
    for weight_sum, counts in zip(totals.weight_sums, batch.counts):
        check_canary(weight_sum, counts, model.dtype)
    tokens = batch.counts[0].tokens
    router_terms = (
        _reduced_router_losses(router_losses, model) if router_losses is not None and router_losses.losses else []
    )
    terms = [*zip(loss.terms, totals.terms), *router_terms]
    return StepMetrics(
        loss=sum(term.coefficient * value for term, value in terms),
        magnitude=totals.magnitude[0] + sum(term.coefficient * value for term, value in router_terms),
        weight_sum=totals.weight_sums[0],
        valid_tokens=tokens,
        total_tokens=batch.total_tokens,
        computed_tokens=batch.computed_tokens,
        sequences=len(batch.lengths),
        micro_batches=len(batch.micro_batches),
        terms={term.name: value for term, value in terms},
        observed=totals.observed(loss, tokens),
        lost=int(totals.lost),
        busy_seconds=busy.seconds(),
        cost=batch.cost,
        total_cost=batch.total_cost,
    )


def _reduced_router_losses(router_losses: RouterLosses, model: Model) -> list[tuple[RouterLoss, float]]:
    """The losses of all routers of the step, none of them negative, once their weights are those of the counts."""
    sums, consumed = reduce_losses(router_losses, model.mesh)
    layers = sum(model.arch.sparse)
    for weight_sum, counts in zip(consumed, router_losses.counts):
        check_canary(weight_sum / layers, counts, model.dtype, "a layer's routers")
    return list(zip(router_losses.losses, sums))


def run_targets(model: Model, batch: StepBatch, head: Head, shape: tuple[int, ...] = ()) -> Tensor:
    """What a head gives for all targets of the step, [total tokens, *shape] fp64 in the order of the samples, on every
    rank.

    head: a micro-batch and the hidden states of its row -> [N, *shape].
    shape: of what it gives for one target.
    Collectives: the model's and the head's; one all-reduce over dp x context and one over pp of the result, where
    these have more than one rank.
    """

    def collect(micro_batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return hidden.new_zeros(()), (micro_batch.origin_N, head(micro_batch, hidden))

    flat = torch.zeros((batch.total_tokens, *shape), dtype=torch.float64, device=torch.cuda.current_device())
    forward = partial(_forward, model, None, lambda micro_batch: None)
    for origin_N, values_N in run_schedule(
        model.mesh, model.chunks, batch.micro_batches, batch.rows, forward, collect, forward_only=True
    ):
        flat[origin_N] = values_N.to(torch.float64)
    for group in model.mesh.loss_groups:
        dist.all_reduce(flat, group=group)
    return flat


@phase("forward")
def _forward(
    model: Model,
    router_losses: RouterLosses | None,
    bound: Callable[[PackedBatch], Bound | None],
    chunk: nn.Module,
    micro_batch: PackedBatch,
) -> Tensor:
    watchdog.beat()
    routed = routed_tokens(micro_batch, model.mesh, router_losses) if model.arch.experts else None
    row = RoutedRow(
        lengths=micro_batch.lengths,
        parents=micro_batch.parents,
        uploads=micro_batch.uploads,
        tokens=routed,
        bound=bound(micro_batch),
    )
    return forward_row(chunk, micro_batch.tokens_R, micro_batch.positions_R, row)


def _bound(mesh: Mesh, share: float | None, lost: Tensor | None, micro_batch: PackedBatch) -> Bound | None:
    if share is None or lost is None:
        return None
    shards = mesh.layout.context * (mesh.tp.size() if mesh.layout.sequence_parallel else 1)
    return Bound(share, micro_batch.longest // shards, lost)


@phase("loss")
def _loss(model: Model, loss: Loss, micro_batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What is differentiated of a micro-batch, and its `StepTotals.flat`."""
    inputs = _token_inputs(model, micro_batch, hidden, loss)
    weights_AN = micro_batch.weights_AN.to(torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    value, magnitude, sums = hidden.new_zeros(()), hidden.new_zeros((), dtype=torch.float64), []
    for term in loss.terms:
        terms_N = weights_AN[loss.aggregations.index(term.aggregation)] * term.values(inputs)
        value = value + term.coefficient * terms_N.sum()
        sums.append(terms_N.detach().sum(dtype=torch.float64))
        magnitude = magnitude + abs(term.coefficient) * terms_N.detach().abs().sum(dtype=torch.float64)
    with torch.no_grad():
        totals = StepTotals(
            weight_sums=[*weights_AN.sum(1, dtype=torch.float64)],
            terms=sums,
            magnitude=[magnitude],
            means=[per_token(inputs).sum(dtype=torch.float64) for per_token in loss.mean_metrics.values()],
            moments=[sum_ for pair in loss.correlation_metrics.values() for sum_ in moments_of(*pair(inputs))],
            largest=[largest_of(per_token(inputs)) for per_token in loss.max_metrics.values()],
        )
    return value, torch.stack(totals.flat())


def _token_inputs(model: Model, micro_batch: PackedBatch, hidden: Tensor, loss: Loss) -> TokenInputs:
    at = micro_batch.labelled_N
    values_N = entropy_N = None
    if model.arch.critic:
        values_N = model.values(hidden, at)
        logprobs_N = values_N.new_zeros(0)
    else:
        logprobs_N, entropy_N = model.logprobs(
            hidden, at, micro_batch.targets_N, temperature=loss.temperature, with_entropy=loss.needs_entropy
        )
    dtype = logprobs_N.dtype
    fields = Fields({name: values.to(dtype) for name, values in micro_batch.fields.items()})
    documents = (micro_batch.document_N, len(micro_batch.length_S))
    return TokenInputs(logprobs_N, entropy_N, values_N, fields, *documents, model.mesh.context)


def check_canary(weight_sum: float, counts: StepCounts, dtype: torch.dtype, consumer: str = "the loss head") -> None:
    """dtype: of the model. Raises CanaryError."""
    tolerance = CANARY_TOLERANCE[torch.float64 if dtype == torch.float64 else torch.float32]
    if not abs(weight_sum - counts.weight_sum) <= tolerance * max(abs(counts.weight_sum), tolerance):
        raise CanaryError(
            f"{consumer} consumed weights that add up to {weight_sum!r}, but {counts.tokens} valid tokens in "
            f"{counts.sequences} sequences promise {counts.weight_sum!r}: a shard, a micro-batch or a mask is wrong"
        )


# ---- numbers of a step over its micro-batches and ranks, all in fp64 -------------------------------------------------


Number = TypeVar("Number", Tensor, float)


@dataclass(frozen=True)
class StepTotals(Generic[Number]):
    """What the loss is made of: sums over the targets of a micro-batch, or over all of the step, and largest values.

    weight_sums: consumed weights, of each aggregation.
    terms: of each term, without its coefficient.
    magnitude: a single number, see `StepMetrics`.
    means: of each of the loss's mean_metrics, not yet divided.
    moments: MOMENTS of each of its correlation_metrics.
    largest: of each of its max_metrics.
    lost: see `StepMetrics`; known of the step only.
    """

    weight_sums: Sequence[Number]
    terms: Sequence[Number]
    magnitude: Sequence[Number]
    means: Sequence[Number]
    moments: Sequence[Number]
    largest: Sequence[Number]
    lost: float = 0.0

    @staticmethod
    def sizes(loss: Loss) -> list[int]:
        """How many numbers `flat` has of each field; all but the last are sums."""
        summed = [len(loss.aggregations), len(loss.terms), 1, len(loss.mean_metrics)]
        return [*summed, MOMENTS * len(loss.correlation_metrics), len(loss.max_metrics)]

    def flat(self) -> list[Number]:
        """The numbers of a micro-batch."""
        return [*self.weight_sums, *self.terms, *self.magnitude, *self.means, *self.moments, *self.largest]

    @staticmethod
    def read(loss: Loss, flat: Sequence[float]) -> "StepTotals[float]":
        """flat: of the step, and `lost` if there is a bound."""
        left = iter(flat)
        fields = [[*islice(left, size)] for size in StepTotals.sizes(loss)]
        return StepTotals(*fields, lost=sum(left))

    def observed(self: "StepTotals[float]", loss: Loss, tokens: int) -> dict[str, float]:
        """The loss's metrics by name. tokens: valid ones of the step."""
        return {
            **{name: total / max(tokens, 1) for name, total in zip(loss.mean_metrics, self.means)},
            **{n: correlation(self.moments[MOMENTS * k :], tokens) for k, n in enumerate(loss.correlation_metrics)},
            **dict(zip(loss.max_metrics, self.largest)),
        }


def totals_of(consumed: Sequence[Tensor], sums: int, largest: int, mesh: Mesh, more: Tensor | None = None) -> Tensor:
    """The sums of the first `sums` numbers of all micro-batches and ranks, and the largest of each of the others.

    consumed: of each micro-batch of this rank, [sums + largest] fp64; those others are not negative.
    more: a number of this rank, one of those others, 0-d.
    Collectives: one all-gather over dp x context and one over pp, where only the last stage has something to add; each
    where it has more than one rank.
    """

    def reduced(parts: Sequence[Tensor]) -> Tensor:
        stacked = torch.stack(list(parts))
        return torch.cat([stacked[:, :sums].sum(0), stacked[:, sums:].amax(0)])

    zeros = torch.zeros(sums + largest, dtype=torch.float64, device=torch.cuda.current_device())
    totals = reduced([zeros, *consumed])
    if more is not None:
        totals = torch.cat([totals, more[None]])
    for group in mesh.loss_groups:
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
