"""How many prompts a batch needs: one generation of them, or with dynamic sampling as many as have variance."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.reward.rewarder import check_rewarded
from isoloss.engine.rl.trajectory import Group
from isoloss.parallel import UserError


@dataclass(frozen=True)
class Draws:
    """What was drawn for a batch. kept: the groups to learn from, in the order of their draws. dropped: those that
    dynamic sampling left out, for having no variance. cursor: prompts that the run has drawn so far."""

    kept: tuple[Group, ...]
    dropped: tuple[Group, ...]
    rounds: int
    cursor: int


def draw(groups_of: Callable[[int, int], list[Group]], cursor: int, config: RLConfig) -> Draws:
    """The groups of a batch: batch.global_size of them, or with dynamic sampling as many that have variance.

    groups_of(first draw, count): generate and reward the next prompts. A round draws exactly what is still missing, so
    nothing is generated and then left over; what is dropped is told. (DAPO, arXiv 2503.14476, section 3.2.)
    Raises UserError where dynamic sampling finds too few and algorithm.on_shortage says so, or finds none, and where
    nothing that was drawn could be rewarded.
    """
    algorithm, wanted = config.algorithm, config.batch.global_size
    kept: list[Group] = []
    dropped: list[Group] = []
    for rounds in itertools.count(1):
        missing = wanted - len(kept)
        groups = groups_of(cursor, missing)
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
    return Draws(tuple(kept), tuple(dropped), rounds, cursor)


def _solved(groups: Sequence[Group]) -> int:
    return sum(any(t.valid and t.reward > 0 for t in group.trajectories) for group in groups)
