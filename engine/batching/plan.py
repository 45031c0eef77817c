"""Where the samples of a step are computed: which rank has which, and what several begin with once."""

from collections.abc import Sequence
from dataclasses import dataclass

from isoloss.engine.batching.balance import CostModel, Plan, make_plan
from isoloss.engine.batching.prefixes import Piece, fold, shared_beginnings, unfolded
from isoloss.engine.batching.sample import Sample
from isoloss.parallel import Layout


@dataclass(frozen=True)
class Placement:
    """The same on every rank.

    plan: of all samples of the step.
    pieces: pieces[dp_rank][m], what micro-batch m of that rank is computed in; each piece names samples by their place
        in the micro-batch.
    """

    plan: Plan
    pieces: Sequence[Sequence[Sequence[Piece]]]

    @classmethod
    def apart(cls, plan: Plan, lengths: Sequence[int]) -> "Placement":
        """Every sample a piece of its own. lengths: of all samples."""
        return cls(plan, [[unfolded([lengths[i] for i in m]) for m in of_rank] for of_rank in plan.micro_batches])


def plan_step(
    samples: Sequence[Sample], layout: Layout, max_tokens: int, cost_model: CostModel, *, share_prefixes: bool = False
) -> Plan:
    """`make_plan` of samples on a layout.

    share_prefixes: what samples of a group begin with alike costs once in a micro-batch, where that pays.
    """
    groups = []
    if share_prefixes:
        groups = shared_beginnings([sample.tokens_T for sample in samples], [sample.group for sample in samples])
    lengths, multiple_of = [len(sample) for sample in samples], layout.pp if layout.vpp > 1 else 1
    return make_plan(lengths, layout.dp, max_tokens, cost_model, multiple_of, groups, layout.pp)


def place(
    samples: Sequence[Sample], layout: Layout, max_tokens: int, cost_model: CostModel, *, share_prefixes: bool = False
) -> Placement:
    """`plan_step`, and the pieces of its micro-batches. A pure function of the samples' tokens and groups.

    share_prefixes: what samples of a micro-batch begin with alike is a piece of them together, where that pays.
    """
    plan = plan_step(samples, layout, max_tokens, cost_model, share_prefixes=share_prefixes)
    if not share_prefixes:
        return Placement.apart(plan, [len(sample) for sample in samples])
    pieces = [[fold([samples[i].tokens_T for i in m]) for m in of_rank] for of_rank in plan.micro_batches]
    return Placement(plan, pieces)
