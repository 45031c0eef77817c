"""The groups of a batch: one generation of prompts, or with dynamic sampling as many rounds as it takes."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.reward.rewarder import check_rewarded
from isoloss.engine.rl.trajectory import Group
from isoloss.parallel import UserError


class Generates(Protocol):
    def groups(self, first_draw: int, num_prompts: int) -> list[Group]:
        """Generate and reward completions of the next prompts (`Rollout.groups`)."""
        ...


@dataclass(frozen=True)
class SampledGroups:
    """What was sampled for a batch.

    kept: the groups to learn from, in the order of their draws.
    dropped: those that dynamic sampling left out, for having no variance.
    cursor: prompts that the run has drawn so far.
    """

    kept: tuple[Group, ...]
    dropped: tuple[Group, ...]
    rounds: int
    cursor: int


def sample_groups(rollout: Generates, cursor: int, config: RLConfig) -> SampledGroups:
    """The groups of a batch: batch.global_size of them, or with dynamic sampling as many that have variance.

    cursor: prompts drawn before. A round draws exactly what is still missing, so nothing is generated and then left
    over; what is dropped is logged. (DAPO, arXiv 2503.14476, section 3.2.)
    Raises UserError where dynamic sampling finds too few and algorithm.on_shortage says so, or finds none, and where
    nothing that was drawn could be rewarded.
    """
    algorithm, wanted = config.algorithm, config.batch.global_size
    kept: list[Group] = []
    dropped: list[Group] = []
    for rounds in itertools.count(1):
        missing = wanted - len(kept)
        groups = rollout.groups(cursor, missing)
        cursor += missing
        for group in groups:
            (dropped if algorithm.dynamic_sampling and not group.varied else kept).append(group)
        check_rewarded([t for group in (*kept, *dropped) for t in group.trajectories], config.reward)
        enough = len(kept) == wanted
        if enough or rounds == algorithm.max_draws:
            break
    if not enough and (algorithm.on_shortage == "error" or not kept):
        raise UserError(
            f"dynamic sampling: after algorithm.max_draws={algorithm.max_draws} rounds only {len(kept)} of "
            f"batch.global_size={wanted} groups have rewards that differ ({len(dropped)} dropped, "
            f"{_solved(dropped)} of them all right); raise max_draws or rollout.num_generations, choose prompts of "
            "medium difficulty" + (", or set algorithm.on_shortage=smaller" if kept else "")
        )
    return SampledGroups(tuple(kept), tuple(dropped), rounds, cursor)


def _solved(groups: Sequence[Group]) -> int:
    return sum(any(t.valid and t.reward > 0 for t in group.trajectories) for group in groups)
