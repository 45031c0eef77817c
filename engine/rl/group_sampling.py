"""Sample the groups of a batch, in waves: batch.global_size groups, with dynamic sampling only ones with variance."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.reward.rewarder import check_rewarded
from isoloss.engine.rl.rollout import Rollout
from isoloss.engine.rl.trajectory import Group
from isoloss.parallel import UserError


@dataclass
class SampledGroups:
    """The groups that are sampled for a batch; complete when its waves have been taken.

    waves: the groups to learn from, wave by wave.
    kept: all groups to learn from, in the order of their waves.
    dropped: groups that dynamic sampling left out, for having no variance.
    counts: counts of the ledger, and ages of the tokens of `kept`, by the names of metrics.
    """

    kept: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    rounds: int = 0
    counts: Mapping[str, float] = field(default_factory=dict)
    waves: Iterator[list[Group]] = field(default_factory=lambda: iter(()))


def sample_groups(rollout: Rollout, config: RLConfig) -> SampledGroups:
    """Return the groups of a batch, generated and rewarded as their waves are taken: batch.global_size of them, with
    dynamic sampling only ones with variance.

    The first round has rollout.waves waves and each other round one. Their groups follow from the order of the prompts,
    not from the order in which they finish.

    A round takes exactly what is still missing, so no group is generated and then left over; dropped groups are logged.
    (DAPO, arXiv 2503.14476, section 3.2.)
    Raises UserError where dynamic sampling finds too few and algorithm.on_shortage says so, or finds none, and where
    nothing that was drawn could be rewarded.
    """
    sampled = SampledGroups()
    sampled.waves = _waves(rollout, sampled, config)
    return sampled


def _waves(rollout: Rollout, sampled: SampledGroups, config: RLConfig) -> Iterator[list[Group]]:
    algorithm, wanted, ledger = config.algorithm, config.batch.global_size, rollout.ledger
    ledger.begin_batch(rollout.version, config.rollout.max_staleness)
    kept, dropped = sampled.kept, sampled.dropped
    for sampled.rounds in range(1, algorithm.max_draws + 1):
        missing = wanted - len(kept)
        sizes = wave_sizes(missing, config.rollout.waves if sampled.rounds == 1 else 1)
        for number, size in enumerate(sizes):
            wave = []
            for group in rollout.collect(size, prefetch=sum(sizes[number + 1 :])):
                if config.environment.program is not None and group.faulted:
                    ledger.drop(group.draw, "faulted")
                    dropped.append(group)
                elif algorithm.dynamic_sampling and not group.varied:
                    ledger.drop(group.draw, "no_variance" if group.rewarded else "reward_failed")
                    dropped.append(group)
                else:
                    ledger.train(group.draw)
                    wave.append(group)
            kept += wave
            if wave:
                yield wave
        check_rewarded([t for group in (*kept, *dropped) for t in group.trajectories], config.rewarded_by)
        enough = len(kept) == wanted
        if enough:
            break
    if not enough and (algorithm.on_shortage == "error" or not kept):
        solved = sum(any(t.valid and t.reward > 0 for t in group.trajectories) for group in dropped)
        raise UserError(
            f"dynamic sampling: after algorithm.max_draws={algorithm.max_draws} rounds only {len(kept)} of "
            f"batch.global_size={wanted} groups have rewards that differ ({len(dropped)} dropped, "
            f"{solved} of them all right); raise max_draws or rollout.num_generations, choose prompts of "
            "medium difficulty" + (", or set algorithm.on_shortage=smaller" if kept else "")
        )
    lengths = ledger.mean_lengths() if config.rollout.over_sample > 1 else {}
    sampled.counts = {**ledger.counts(), **lengths, **rollout.token_ages(kept)}


def wave_sizes(groups: int, waves: int) -> list[int]:
    """Return the sizes of at most `waves` waves, as even as possible and none of 0."""
    waves = min(waves, groups)
    return [(n + 1) * groups // waves - n * groups // waves for n in range(waves)]
