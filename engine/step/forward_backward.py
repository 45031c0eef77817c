"""Run one pass over the micro-batches of a step: schedule, loss, metrics. SFT and RL share it.

Shape suffixes: T tokens of one sample, R of this rank's slice of a packed row, N labeled positions on this rank,
A aggregations of the loss, O outputs of the loss, K targets of a position.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isoloss.engine.batching.packing import PackedBatch
from isoloss.engine.instruments import watchdog
from isoloss.engine.instruments.profiling import Stopwatch, phase
from isoloss.engine.step.losses import Fields, Loss, TokenInputs, one_per_target
from isoloss.engine.step.moe_balancing import reduce_losses, replayed_fraction, routed_tokens
from isoloss.engine.step.sequence_sums import KnownSums, Part, refuse_sums
from isoloss.engine.step.step_batch import MicroBatches, StepBatch
from isoloss.models.mcore.gpt import forward_row
from isoloss.models.mcore.moe.dispatch import Bound
from isoloss.models.mcore.moe.experts import RoutedRow
from isoloss.models.mcore.moe.router_losses import ChoiceCounts, RouterLoss, RouterLosses
from isoloss.models.model import Model
from isoloss.parallel import Mesh
from isoloss.parallel.normalizer import StepCounts
from isoloss.parallel.schedule import run_schedule

# How far the consumed weights may be from their closed form: rounding of fp64 and of fp32 weights.
CANARY_TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}
MOMENTS = 5  # of two variables: see `moments_of`
# Of a variance, relative to the mean square: below it the difference of the two sums is mostly rounding.
SMALLEST_VARIANCE = 1e-12

Head = Callable[[PackedBatch, Tensor], Tensor]


class CanaryError(RuntimeError):
    """Raised where the loss head did not consume the weights that the counts promise: the loss would be wrong."""


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of a pass over a step, over all ranks.

    loss: the number that was differentiated.
    magnitude: sum of the absolute values of its summands, which its rounding error is relative to.
    weight_sum: sum of the first term's weights, as consumed.
    terms: each term's sum, by name, without its coefficient; terms of the routers too, which are part of the loss.
    observed: the loss's metrics by name.
    outputs: each of the loss's outputs by name, sample by sample: [T] fp64, or [T, K] where it is one for each of K
        targets; 0 where mask_T is False; on every rank.
    sequences: trajectories of the step.
    valid_tokens: targets.
    total_tokens: tokens without padding. computed_tokens: the same, with shared tokens counted once.
    micro_batches: their number on each rank.
    seconds: duration of forward and backward, where they were timed.
    lost: rows for which messages between experts had no room, on the rank that lost most; above 0 the step is worth
        nothing.
    reruns: number of times `Engine.train_step` ran the step again for that; None without a bound.
    busy_seconds: time in which this rank's device computed its micro-batches, before it waits for other ranks' sums.
    cost, total_cost: forward FLOPs of this rank, and of all.
    replayed: part of the choices of experts that `Sample.routes` gave, by computed token and layer; None in a step
        without routes.
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
    outputs: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    lost: int = 0
    reruns: int | None = None
    busy_seconds: float = 0.0
    cost: float = 0.0
    total_cost: float = 0.0
    replayed: float | None = None


@dataclass(frozen=True)
class Pass:
    """A loss of a step's samples, for `run_steps`.

    router_losses: losses that the routers add (`moe_balancing.start`).
    activate: function that lets the model compute with the adapter of this pass; called before each forward and each
        backward of its micro-batches, as those of other passes may lie between.
    known: sums over sequences of a first pass (`run_inputs`).
    """

    batch: StepBatch
    loss: Loss
    router_losses: RouterLosses | None = None
    activate: Callable[[], None] | None = None
    known: KnownSums | None = None


def run_steps(
    model: Model, passes: Sequence[Pass], *, dispatch_bound: float | None = None, forward_only: bool = False
) -> list[StepMetrics]:
    """Run forward and backward of every micro-batch of all passes in one schedule; gradients accumulate unreduced in
    the buffers of what is trained. Return the metrics of each pass; busy_seconds are those of the schedule.

    dispatch_bound: bound of messages between experts; the caller looks at `lost`.
    Raises CanaryError if the weights consumed by the loss head, or by the routers, are not those of the counts.
    Collectives: the model's and the losses'; for each pass one all-gather over dp x context and one over pp of a few
    numbers, and a pair of all-reduces with router losses, with outputs of the loss or with routes; with a bound, an
    all-reduce of one number over tp; with outputs of K targets a pair more.
    """
    lost = None if dispatch_bound is None else torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    bound, busy = partial(_bound, model.mesh, dispatch_bound, lost), Stopwatch()
    turns = [(number, index) for number, each in enumerate(passes) for index in range(len(each.batch.micro_batches))]

    def micro_batch(turn: int) -> tuple[int, PackedBatch]:
        number, index = turns[turn]
        return number, passes[number].batch.micro_batches[index]

    choices: list[list[dict[int, Tensor]]] = [[] for _ in passes]

    def forward(chunk: nn.Module, turn: tuple[int, PackedBatch]) -> Tensor:
        number, row = turn
        each = passes[number]
        of_routers = _OfRouters(each.router_losses, choices[number] if each.batch.has_routes else None)
        if each.activate is None:
            return _forward(model, of_routers, bound, chunk, row)
        each.activate()
        output = _forward(model, of_routers, bound, chunk, row)
        if output.requires_grad:  # the backward may compute the layers again
            output.register_hook(lambda _, activate=each.activate: activate())
        return output

    def of_loss(turn: tuple[int, PackedBatch], hidden: Tensor):
        number, row = turn
        value, numbers = _loss(model, passes[number].loss, row, hidden, passes[number].known)
        return value, (number, numbers)

    rows = [tokens for each in passes for tokens in each.batch.rows]
    returned = run_schedule(
        model.mesh, model.chunks, MicroBatches(len(turns), micro_batch), rows, forward, of_loss,
        forward_only=forward_only,
    )  # fmt: skip
    busy.stop()
    if lost is not None and model.mesh.tp.size() > 1:  # whose ranks have different tokens, and else the same numbers
        dist.all_reduce(lost, dist.ReduceOp.MAX, group=model.mesh.tp)
    # By the pass that a micro-batch names, not by its turn: the canary sees one that was computed twice, or not at all.
    parts = [[numbers for of, numbers in returned if of == number] for number in range(len(passes))]
    metrics = [step_metrics(model, each, part, lost, busy) for each, part in zip(passes, parts)]
    for number, each in enumerate(passes):
        if each.batch.has_routes:
            replayed = replayed_fraction(choices[number], model.mesh, model.device)
            metrics[number] = replace(metrics[number], replayed=replayed)
    return metrics


def step_metrics(
    model: Model,
    each: Pass,
    returned: Sequence[tuple[Tensor, Tensor, Sequence[Tensor] | None]],
    lost: Tensor | None,
    busy: Stopwatch,
) -> StepMetrics:
    """Return the metrics of a pass. returned: second results of `_loss`, of its micro-batches on the last stage."""
    batch, loss, router_losses = each.batch, each.loss, each.router_losses
    *summed, largest = StepTotals.sizes(loss)
    flat = totals_of([numbers for numbers, *_ in returned], sum(summed), largest, model.mesh, lost)
    totals = StepTotals.read(loss, flat.cpu().tolist())  # the host waits for the device here, once a step
    for weight_sum, counts in zip(totals.weight_sums, batch.counts):
        check_canary(weight_sum, counts, model.dtype)
    tokens = batch.counts[0].tokens
    router_terms = (
        _reduced_router_losses(router_losses, model) if router_losses is not None and router_losses.losses else []
    )
    terms = [*zip(loss.terms, totals.terms), *router_terms]
    outputs = {}
    if loss.outputs:
        parts = [(origin_N, outputs) for _, origin_N, outputs in returned if outputs is not None]
        outputs = {name: v.split(batch.lengths) for name, v in zip(loss.outputs, _outputs(loss, batch, parts, model))}
    return StepMetrics(
        loss=sum(term.coefficient * value for term, value in terms),
        magnitude=totals.magnitude[0] + sum(term.coefficient * value for term, value in router_terms),
        weight_sum=totals.weight_sums[0],
        valid_tokens=tokens,
        total_tokens=batch.total_tokens,
        computed_tokens=batch.computed_tokens,
        sequences=batch.sequences,
        micro_batches=len(batch.micro_batches),
        terms={term.name: value for term, value in terms},
        observed=totals.observed(loss, tokens),
        outputs=outputs,
        lost=int(totals.lost),
        busy_seconds=busy.seconds(),
        cost=batch.cost,
        total_cost=batch.total_cost,
    )


def _outputs(
    loss: Loss, batch: StepBatch, parts: Sequence[tuple[Tensor, Sequence[Tensor]]], model: Model
) -> Sequence[Tensor]:
    """Return the outputs of a loss in the order of the step, [total tokens] each, or [total tokens, K].

    parts: for each micro-batch that this rank has the loss of, places of its targets, and the outputs.
    Collectives: those of `at_targets`; with K targets a position, once more for which outputs are one for each of them:
    only the last stage has seen.
    """
    many = len(loss.outputs)
    if not batch.target_shape:
        stacked = [(origin_N, torch.stack([*outputs], 1)) for origin_N, outputs in parts]
        return at_targets(stacked, (many,), batch.total_tokens, model.mesh).unbind(1)

    def of_targets(output: Tensor) -> Tensor:
        return (output if output.ndim > 1 else output[:, None]).expand(-1, *batch.target_shape)

    widened = [(origin_N, torch.stack([*map(of_targets, outputs)], 1)) for origin_N, outputs in parts]
    of_each = torch.zeros(many, dtype=torch.int64, device=torch.cuda.current_device())
    for _, outputs in parts[:1]:
        of_each += torch.tensor([output.ndim > 1 for output in outputs], device=of_each.device)
    for group in model.mesh.loss_groups:
        dist.all_reduce(of_each, dist.ReduceOp.MAX, group=group)
    values = at_targets(widened, (many, *batch.target_shape), batch.total_tokens, model.mesh).unbind(1)
    return [value if each else value[:, 0] for value, each in zip(values, of_each.tolist())]


def _reduced_router_losses(router_losses: RouterLosses, model: Model) -> list[tuple[RouterLoss, float]]:
    """Return the losses of all routers of the step, none of them negative, after their canary."""
    sums, consumed = reduce_losses(router_losses, model.mesh)
    layers = sum(model.arch.sparse)
    for weight_sum, counts in zip(consumed, router_losses.counts):
        check_canary(weight_sum / layers, counts, model.dtype, "a layer's routers")
    return list(zip(router_losses.losses, sums))


def run_targets(model: Model, batch: StepBatch, head: Head, shape: tuple[int, ...] = ()) -> Tensor:
    """Return the values of a head for all targets of the step, as `at_targets`.

    head: a micro-batch and the hidden states of its row -> [N, *shape].
    Collectives: the model's and the head's, and those of `at_targets`.
    """

    def collect(micro_batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return hidden.new_zeros(()), (micro_batch.origin_N, head(micro_batch, hidden))

    forward = partial(_forward, model, _OfRouters(), lambda micro_batch: None)
    parts = run_schedule(model.mesh, model.chunks, batch.micro_batches, batch.rows, forward, collect, forward_only=True)
    return at_targets(parts, shape, batch.total_tokens, model.mesh)


def run_inputs(model: Model, batch: StepBatch, loss: Loss, choices: ChoiceCounts | None = None) -> list[Part]:
    """Return what a loss reads of every micro-batch, without gradients; [] but on the last stage.

    choices: counts to which the routers add their choices.
    Collectives: the model's.
    """

    def collect(micro_batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Part]:
        return hidden.new_zeros(()), (micro_batch, _token_inputs(model, micro_batch, hidden, loss))

    forward = partial(_forward, model, _OfRouters(choices), lambda micro_batch: None)
    with torch.no_grad():
        return run_schedule(
            model.mesh, model.chunks, batch.micro_batches, batch.rows, forward, collect, forward_only=True
        )


def at_targets(parts: Sequence[tuple[Tensor, Tensor]], shape: tuple[int, ...], total_tokens: int, mesh: Mesh) -> Tensor:
    """Put values of targets at their places in the step, [total tokens, *shape] fp64 in the order of the samples, on
    every rank; 0 elsewhere.

    parts: for each micro-batch, the places [N] and the values [N, *shape].
    shape: the shape of the value of one target.
    Collectives: one all-reduce over dp x context and one over pp, where these have more than one rank.
    """
    flat = torch.zeros((total_tokens, *shape), dtype=torch.float64, device=torch.cuda.current_device())
    for origin_N, values_N in parts:
        flat[origin_N] = values_N.to(torch.float64)
    for group in mesh.loss_groups:
        dist.all_reduce(flat, group=group)
    return flat


@dataclass(frozen=True)
class _OfRouters:
    """The losses that the routers of a pass add to, and for each forward the counts of `RoutedTokens`."""

    watched: RouterLosses | ChoiceCounts | None = None
    choices: list[dict[int, Tensor]] | None = None

    def counts(self) -> dict[int, Tensor] | None:
        """Return counts of one more forward."""
        if self.choices is None:
            return None
        self.choices.append({})
        return self.choices[-1]


@phase("forward")
def _forward(
    model: Model,
    of_routers: _OfRouters,
    bound: Callable[[PackedBatch], Bound | None],
    chunk: nn.Module,
    micro_batch: PackedBatch,
) -> Tensor:
    watchdog.beat()
    routed = None
    if model.arch.experts:
        routed = routed_tokens(micro_batch, model.arch, model.mesh, of_routers.watched, of_routers.counts())
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
def _loss(
    model: Model, loss: Loss, micro_batch: PackedBatch, hidden: Tensor, known: KnownSums | None
) -> tuple[Tensor, tuple[Tensor, Tensor, Sequence[Tensor] | None]]:
    """Return the differentiated loss of a micro-batch, its `StepTotals.flat`, places of targets, and outputs.

    known: sums of a first pass, whose slopes are then what is differentiated.
    """
    inputs = _token_inputs(model, micro_batch, hidden, loss, known)
    weights_AN = micro_batch.weights_AN.to(torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    value, sums = hidden.new_zeros(()), []
    magnitude: Any = 0.0
    with torch.set_grad_enabled(torch.is_grad_enabled() and known is None):
        for term in loss.terms:
            terms_N = weights_AN[loss.aggregations.index(term.aggregation)] * term.values(inputs)
            value = value + term.coefficient * terms_N.sum()
            sums.append(terms_N.detach().sum(dtype=torch.float64))
            magnitude = magnitude + abs(term.coefficient) * terms_N.detach().abs().sum(dtype=torch.float64)
    if known is not None:
        value = known.linear(inputs, micro_batch.origin_N)
    with torch.no_grad():
        totals = StepTotals(
            weight_sums=[*weights_AN.sum(1, dtype=torch.float64)],
            terms=sums,
            magnitude=[magnitude],
            means=[per_token(inputs).sum(dtype=torch.float64) for per_token in loss.mean_metrics.values()],
            moments=[sum_ for pair in loss.correlation_metrics.values() for sum_ in moments_of(*pair(inputs))],
            largest=[largest_of(per_token(inputs)) for per_token in loss.max_metrics.values()],
        )
        values = [one_per_target(name, of, inputs, or_each=True) for name, of in loss.outputs.items()]
        outputs = [each.detach().double() for each in values]  # which keep no graph
    return value, (torch.stack(totals.flat()), micro_batch.origin_N, outputs or None)


def _token_inputs(
    model: Model, micro_batch: PackedBatch, hidden: Tensor, loss: Loss, known: KnownSums | None = None
) -> TokenInputs:
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
    row = micro_batch.document_N, len(micro_batch.length_S)
    if micro_batch.cut_sequences:
        row = micro_batch.sequence_N, micro_batch.num_sequences
    sums = None
    if micro_batch.spread_sequences:
        sums = refuse_sums if known is None else known.replayed(micro_batch.sequence_N)
    return TokenInputs(logprobs_N, entropy_N, values_N, fields, *row, model.mesh.context, sums)


def check_canary(weight_sum: float, counts: StepCounts, dtype: torch.dtype, consumer: str = "the loss head") -> None:
    """Raise CanaryError where consumed weights do not add up to the counts' closed form. dtype: the model's."""
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
    """Sums and largest values over the targets of a micro-batch, or of the step: loss and metrics are made of them.

    weight_sums: consumed weights of each aggregation.
    terms: sum of each term, without its coefficient.
    magnitude: a single number, see `StepMetrics`.
    means: sum of each of the loss's mean_metrics, not yet divided.
    moments: MOMENTS of each of its correlation_metrics.
    largest: largest value of each of its max_metrics.
    lost: see `StepMetrics`; known for the step only.
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
        """Return how many numbers of each field `flat` has; all but the last are sums."""
        summed = [len(loss.aggregations), len(loss.terms), 1, len(loss.mean_metrics)]
        return [*summed, MOMENTS * len(loss.correlation_metrics), len(loss.max_metrics)]

    def flat(self) -> list[Number]:
        """Return the numbers of a micro-batch in one list."""
        return [*self.weight_sums, *self.terms, *self.magnitude, *self.means, *self.moments, *self.largest]

    @staticmethod
    def read(loss: Loss, flat: Sequence[float]) -> "StepTotals[float]":
        """Return totals from the list of `flat`. flat: the numbers of the step, and `lost` if there is a bound."""
        left = iter(flat)
        fields = [[*islice(left, size)] for size in StepTotals.sizes(loss)]
        return StepTotals(*fields, lost=sum(left))

    def observed(self: "StepTotals[float]", loss: Loss, tokens: int) -> dict[str, float]:
        """Return the loss's metrics by name. tokens: valid tokens of the step."""
        return {
            **{name: total / max(tokens, 1) for name, total in zip(loss.mean_metrics, self.means)},
            **{n: correlation(self.moments[MOMENTS * k :], tokens) for k, n in enumerate(loss.correlation_metrics)},
            **dict(zip(loss.max_metrics, self.largest)),
        }


def totals_of(consumed: Sequence[Tensor], sums: int, largest: int, mesh: Mesh, more: Tensor | None = None) -> Tensor:
    """Return sums of the first `sums` numbers over all micro-batches and ranks, and the largest of each other number.

    consumed: numbers of each micro-batch of this rank, [sums + largest] fp64; the last `largest` are not negative.
    more: one more number of this rank whose largest counts, 0-d.
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
    """Return the largest of values that are not negative; 0 where there is none."""
    return values_N.amax().double() if len(values_N) else values_N.new_zeros((), dtype=torch.float64)


def moments_of(x_N: Tensor, y_N: Tensor) -> list[Tensor]:
    """Return the sums of x, y, x^2, y^2 and xy."""
    x_N, y_N = x_N.double(), y_N.double()
    return [values_N.sum() for values_N in (x_N, y_N, x_N.square(), y_N.square(), x_N * y_N)]


def correlation(moments: Sequence[float], count: int) -> float:
    """Return Pearson's correlation from `moments_of`; 1 where one of the two does not vary."""
    x, y, xx, yy, xy = (moment / max(count, 1) for moment in moments[:MOMENTS])
    variance_x, variance_y = xx - x * x, yy - y * y
    if variance_x <= SMALLEST_VARIANCE * xx or variance_y <= SMALLEST_VARIANCE * yy:
        return 1.0
    return (xy - x * y) / (variance_x * variance_y) ** 0.5
