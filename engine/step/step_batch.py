"""Make the micro-batches of a step: counts and weights of its samples first, then a row for each micro-batch.

Shape suffixes: T tokens of one sample, A aggregations of the loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import torch

from isoloss.engine.batching.balance import Plan
from isoloss.engine.batching.packing import PackedBatch, StepSamples, pack
from isoloss.engine.batching.sample import Sample, sequence_numbers, target_shape
from isoloss.engine.step.losses import Loss
from isoloss.parallel import Mesh
from isoloss.parallel.normalizer import Ids, StepCounts, count_tokens, token_weights
from isoloss.parallel.sequence import row_length

MicroBatch = TypeVar("MicroBatch")


class MicroBatches(Sequence[MicroBatch]):
    """Micro-batches that are packed when they are asked for, one before its turn: few of them are in memory at once."""

    def __init__(self, length: int, pack_one: Callable[[int], MicroBatch]):
        self._length, self._pack_one = length, pack_one

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        return self._pack_one(range(self._length)[index])


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of this rank, and sizes of the step over all ranks.

    rows: tokens of each micro-batch's whole row, with padding.
    counts: the counts for each aggregation of the loss.
    lengths: tokens of every sample of the step.
    target_shape: shape of the targets of a position, () or (K,).
    sequences: number of trajectories of the step.
    spread: whether samples of one trajectory are in several micro-batches.
    sequence_of: number of the trajectory of each sample of the step.
    owned: tokens of each trajectory, each once; () where none is cut, or samples do not say which they own.
    spans: start and end position of each piece that a dp rank computes, by dp rank.
    cost, total_cost: forward FLOPs of this rank, and of all.
    has_routes: whether a sample of the step, on whatever rank, has routes.
    """

    micro_batches: Sequence[PackedBatch]
    rows: tuple[int, ...]
    counts: tuple[StepCounts, ...]
    lengths: tuple[int, ...]
    sequences: int
    spans: Sequence[Sequence[tuple[int, int]]]
    target_shape: tuple[int, ...] = ()
    spread: bool = False
    sequence_of: Sequence[int] = ()
    owned: Sequence[int] = ()
    cost: float = 0.0
    total_cost: float = 0.0
    has_routes: bool = False

    @property
    def total_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def computed_tokens(self) -> int:
        return sum(stop - start for of_rank in self.spans for start, stop in of_rank)


def prepare_step(samples: Sequence[Sample], loss: Loss, plan: Plan, mesh: Mesh, device: torch.device) -> StepBatch:
    """Count and weigh this rank's share of `samples`; packing waits for its turn.

    samples: all samples of the step, on every rank; an outline is enough for one that another rank computes.
    Raises UserError where they have different numbers of targets a position.
    Collectives: one all-reduce of int64 counts over dp x context, whatever the number of micro-batches and
    aggregations. Context ranks have the same samples; a group of dp alone would be made for these counts only.
    """
    shape = target_shape(samples)
    micro_batches, trees = plan.micro_batches[mesh.dp.rank()], plan.trees[mesh.dp.rank()]
    order = [*chain.from_iterable(micro_batches)]
    masks = [samples[index].mask_T for index in order]
    # Numbered without gaps, from all samples of the step: the same numbers on every rank.
    number_of = {group: number for number, group in enumerate(dict.fromkeys(sample.group for sample in samples))}
    sequence_of, ids = sequence_numbers(samples), {}
    num_sequences = len({*sequence_of})
    if any(aggregation.by_prompt for aggregation in loss.aggregations):
        ids["prompts"] = Ids("group", [number_of[samples[index].group] for index in order], len(number_of))
    if num_sequences < len(samples):
        ids["sequences"] = Ids("sequence", [sequence_of[index] for index in order], num_sequences)
    owned = None
    if num_sequences < len(samples) and all(s.sequence is None or s.owned_T is not None for s in samples):
        owned = [len(s) if s.owned_T is None else int(s.owned_T.sum()) for s in map(samples.__getitem__, order)]
    counts = count_tokens(masks, mesh.dp_context, owned=owned, counted=mesh.context.rank() == 0, **ids)
    weights, step_counts = zip(*(token_weights(masks, counts, aggregation) for aggregation in loss.aggregations))
    weights_of = {index: torch.stack(modes) for index, *modes in zip(order, *weights)}
    step = StepSamples(samples, weights_of, len(loss.aggregations), sequence_of, counts.owned_Q.tolist())
    spread = is_spread(plan, sequence_of)
    rows = longest = [row_length(tree.lengths, mesh) for tree in trees]
    if mesh.layout.ep > 1:  # ranks that share experts may have longer rows
        longest = [max(row_length(tree.lengths, mesh) for tree in ranks) for ranks in zip(*plan.trees)]

    def pack_one(index: int) -> PackedBatch:
        packed = pack(step, micro_batches[index], trees[index], mesh, device)
        cut = {"cut_sequences": num_sequences < len(samples), "spread_sequences": spread}
        return replace(packed, **cut, num_sequences=num_sequences, longest=longest[index])

    packed = MicroBatches(len(micro_batches), pack_one)
    spans = [[*chain.from_iterable(tree.spans for tree in rank_trees)] for rank_trees in plan.trees]
    sizes = tuple(rows), step_counts, tuple(map(len, samples)), num_sequences
    has_routes = any(sample.routes is not None for sample in samples)
    return StepBatch(packed, *sizes, spans, shape, spread, sequence_of, step.owned, has_routes=has_routes)


def is_spread(plan: Plan, sequence_of: Sequence[int]) -> bool:
    """Return whether samples of one sequence are in several micro-batches of the plan."""
    places: dict[int, int] = {}
    micro_batches = chain.from_iterable(plan.micro_batches)
    return any(
        places.setdefault(sequence_of[index], number) != number
        for number, micro_batch in enumerate(micro_batches)
        for index in micro_batch
    )
