"""Plan the samples of a step, which are a list on every rank or are held by a `Holder`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from isoloss.engine.batching.balance import CostModel, Plan, make_plan
from isoloss.engine.batching.prefixes import fold, shared_beginnings
from isoloss.engine.batching.sample import Sample
from isoloss.parallel import Layout

Planner = Callable[[Sequence[Sample]], Plan]


@runtime_checkable
class Holder(Protocol):
    """A sequence of samples that are not whole on every rank, and that brings them where a plan has them computed."""

    def planned(self, plan: Planner) -> tuple[Plan, Sequence[Sample]]:
        """Return the plan, the same on every rank, and the samples: whole where this rank computes them. Collective."""
        ...


def planned(samples: Sequence[Sample], plan: Planner) -> tuple[Plan, Sequence[Sample]]:
    """Return the plan of samples and the samples, wherever they are held. Collective only if a `Holder` holds them."""
    return samples.planned(plan) if isinstance(samples, Holder) else (plan(samples), samples)


def plan_step(
    samples: Sequence[Sample], layout: Layout, max_tokens: int, cost_model: CostModel, *, share_prefixes: bool = False
) -> Plan:
    """Return `make_plan` of samples on a layout. A pure function of the samples' tokens and groups.

    share_prefixes: whether tokens with which samples of a micro-batch begin alike are computed once, where that pays.
    """
    tokens, shared = [sample.tokens_T for sample in samples], {}
    if share_prefixes:
        shared = shared_beginnings(tokens, [sample.group for sample in samples])
    lengths, multiple_of = [len(sample) for sample in samples], layout.pp if layout.vpp > 1 else 1
    plan = make_plan(lengths, layout.dp, max_tokens, cost_model, multiple_of, shared, layout.pp)
    if not share_prefixes:
        return plan
    trees = [[fold([tokens[i] for i in m]) for m in rank_batches] for rank_batches in plan.micro_batches]
    return replace(plan, trees=tuple(map(tuple, trees)))
