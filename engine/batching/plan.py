"""Plan the samples of a step, which are a list on every rank or are held by a `Holder`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from isoloss.engine.batching.balance import CostModel, Plan, make_plan
from isoloss.engine.batching.prefixes import fold, shared_beginnings
from isoloss.engine.batching.sample import Sample
from isoloss.parallel import Layout
from isoloss.parallel.ops.prefix_tree import PrefixTree

Planner = Callable[[Sequence[Sample]], Plan]


@runtime_checkable
class Holder(Protocol):
    """Samples of which some ranks hold outlines; it plans them where they are whole, and sends each to its rank."""

    def planned(self, plan: Planner) -> tuple[Plan, Sequence[Sample]]:
        """Return the plan of all ranks, and the samples: outlines where other ranks compute them. Collective."""
        ...


def planned(samples: Sequence[Sample], plan: Planner) -> tuple[Plan, Sequence[Sample]]:
    """Return the plan of samples and the samples, wherever they are held. Collective only if a `Holder` holds them."""
    return samples.planned(plan) if isinstance(samples, Holder) else (plan(samples), samples)


def plan_step(
    samples: Sequence[Sample], layout: Layout, max_tokens: int, cost_model: CostModel, *, share_prefixes: bool = False
) -> Plan:
    """Return the plan of a step's samples. Reads lengths; with share_prefixes also tokens and groups.

    share_prefixes: whether tokens with which samples of a micro-batch begin alike, and that go to the same experts
        where these are given, are computed once, where that pays.
    """
    tokens, routes, shared = [sample.tokens_T for sample in samples], [sample.routes for sample in samples], {}
    if share_prefixes:
        shared = shared_beginnings(tokens, [sample.group for sample in samples], routes)
    lengths, multiple_of = [len(sample) for sample in samples], layout.pp if layout.vpp > 1 else 1
    plan = make_plan(lengths, layout.dp, max_tokens, cost_model, multiple_of, shared, layout.pp)
    if not share_prefixes:
        return plan

    def tree(micro_batch: Sequence[int]) -> PrefixTree:
        return fold([tokens[i] for i in micro_batch], [routes[i] for i in micro_batch])

    return replace(plan, trees=tuple(tuple(map(tree, rank_batches)) for rank_batches in plan.micro_batches))
