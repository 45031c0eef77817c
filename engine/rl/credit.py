"""Spread rewards over the targets of the samples that trajectories are cut into.

Shape suffixes: S trajectories of the batch, T tokens of one sample, C targets of one trajectory.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.rl import advantages as estimators
from isoloss.engine.rl.algorithms import advantage_of, imported
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.paths import paths_of
from isoloss.engine.rl.trajectory import Trajectory
from isoloss.engine.step.losses import shape_or_type
from isoloss.parallel import UserError


class Cut:
    """The samples that each trajectory is cut into.

    trajectory_of: number of the trajectory of each sample; its samples follow one another.
    """

    def __init__(self, samples: Sequence[Sample], trajectories: Sequence[Trajectory], trajectory_of: Sequence[int]):
        self.samples, self.trajectories, self.trajectory_of = samples, trajectories, trajectory_of
        self.members: list[list[int]] = [[] for _ in trajectories]
        for index, number in enumerate(trajectory_of):
            self.members[number].append(index)

    def turn_C(self, number: int) -> Tensor:
        """Return the turn of each target of a trajectory, sample by sample, [C]."""
        paths = paths_of(self.trajectories[number])
        masks = [self.samples[index].mask_T for index in self.members[number]]
        return torch.cat([torch.from_numpy(path.turn_T)[mask_T] for path, mask_T in zip(paths, masks, strict=True)])

    def gathered(self, number: int, values: Sequence[Tensor]) -> Tensor:
        """Return the values of the targets of a trajectory, sample by sample, [C]. values: of each sample, [T]."""
        return torch.cat([values[index][self.samples[index].mask_T] for index in self.members[number]])

    def scattered(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the values of each sample, [T], 0 where no target is. values: of each trajectory, as `gathered`."""
        made = []
        for members, values_C in zip(self.members, values):
            masks = [self.samples[index].mask_T for index in members]
            parts = values_C.split([int(mask_T.sum()) for mask_T in masks])
            made += [torch.zeros(len(m)).double().masked_scatter(m, part) for m, part in zip(masks, parts)]
        return made


def estimate(
    cut: Cut,
    rewards_S: Tensor,
    group_S: Tensor,
    penalty: Sequence[Tensor | None],
    fields: Sequence[Mapping[str, Tensor]],
    config: RLConfig,
) -> list[dict[str, Tensor]]:
    """Return `advantages` of each sample, and with a critic its `returns`; [T], 0 where mask_T is False.

    penalty: deduction from the reward, token by token where the estimator reads tokens, else its sum.
    """
    samples, trajectories = cut.samples, cut.trajectories
    algorithm, kind = config.algorithm, advantage_of(config.algorithm.advantage)
    function = imported(kind.function, "algorithm.advantage")
    if not kind.by_token:
        valid_S = torch.tensor([trajectory.valid for trajectory in trajectories])
        for number, penalty_T in zip(cut.trajectory_of, penalty):
            rewards_S[number] -= penalty_T.sum() if penalty_T is not None else 0.0
        advantages_S = one_number_each(function(rewards_S, group_S, valid_S), kind.function, len(trajectories))
        advantages = [advantages_S[n] * s.mask_T.double() for n, s in zip(cut.trajectory_of, samples)]
        if algorithm.credit == "turn":
            earned = [earned_before(cut, number) for number in range(len(trajectories))]
            advantages = [a - before for a, before in zip(advantages, cut.scattered(earned))]
        return [{"advantages": a} for a in (whitened(samples, advantages) if kind.whitened else advantages)]

    negative = [-each if each is not None else torch.zeros(len(s)).double() for each, s in zip(penalty, samples)]
    advantages, returns = [], []
    for number, (trajectory, reward) in enumerate(zip(trajectories, rewards_S)):
        several = len(trajectory.turns) > 1
        turn_C = cut.turn_C(number) if several else None
        # Targets in the order in which they were made: samples of branches hold them in another one.
        order_C = None if turn_C is None else turn_C.argsort(stable=True)
        rewards_C = in_order(cut.gathered(number, negative), order_C)
        if len(rewards_C):
            last = turn_C[order_C] if turn_C is not None and order_C is not None else None
            place_rewards(rewards_C, reward, trajectory, last)
        if kind.critic:
            old_values = [each["old_values"] for each in fields]
            values_C = in_order(cut.gathered(number, old_values), order_C)
            advantages_C, returns_C = function(rewards_C, values_C, algorithm.gamma, algorithm.gae_lambda)
            returns.append(out_of_order(returns_C, order_C))
        else:
            advantages_C = function(rewards_C, algorithm.gamma)
        advantages.append(out_of_order(advantages_C, order_C))
    estimated = [{"advantages": advantages_T} for advantages_T in whitened(samples, cut.scattered(advantages))]
    if kind.critic:
        for sample_fields, returns_T in zip(estimated, cut.scattered(returns)):
            sample_fields["returns"] = returns_T
    return estimated


def place_rewards(rewards_C: Tensor, reward: Tensor, trajectory: Trajectory, turn_C: Tensor | None) -> None:
    """Add the reward of a trajectory to those of its targets: a turn's part at the last target of this turn, or of one
    before it where it has none, and the rest at the last of all. turn_C: rising; None where there is one turn."""
    rest = reward
    for number, turn in enumerate(trajectory.turns if turn_C is not None else ()):
        if turn.reward and turn_C is not None:
            until = int(torch.searchsorted(turn_C, number, right=True))
            rewards_C[max(until - 1, 0)] += turn.reward
            rest = rest - turn.reward
    rewards_C[-1] += rest


def earned_before(cut: Cut, number: int) -> Tensor:
    """Return the rewards of the turns before that of each target, [C]: no token has earned them."""
    trajectory = cut.trajectories[number]
    if not trajectory.valid or len(trajectory.turns) == 1:
        return torch.zeros_like(cut.gathered(number, [sample.mask_T for sample in cut.samples])).double()
    rewards = torch.tensor([0.0, *(turn.reward for turn in trajectory.turns)], dtype=torch.float64)
    return rewards.cumsum(0)[cut.turn_C(number)]


def in_order(values_C: Tensor, order_C: Tensor | None) -> Tensor:
    return values_C if order_C is None else values_C[order_C]


def out_of_order(values_C: Tensor, order_C: Tensor | None) -> Tensor:
    """Undo `in_order`."""
    return values_C if order_C is None else torch.empty_like(values_C).index_put((order_C,), values_C)


def one_number_each(advantages_S: object, function: str, count: int) -> Tensor:
    """Return the advantages. Raises UserError where they are not a finite number for each of `count` completions."""
    returned = f"algorithm.advantage={function} returned"
    if not isinstance(advantages_S, Tensor) or advantages_S.shape != (count,):
        shape = shape_or_type(advantages_S)
        raise UserError(f"{returned} {shape} instead of shape ({count},): one number per completion")
    if not advantages_S.isfinite().all():
        first = int((~advantages_S.isfinite()).nonzero()[0])
        raise UserError(f"{returned} {advantages_S[first]:g} for completion {first}: it must be finite")
    return advantages_S


def whitened(samples: Sequence[Sample], advantages: Sequence[Tensor]) -> list[Tensor]:
    """Return the advantages at mean 0 and variance 1 over all targets of the batch, 0 elsewhere."""
    per_target = estimators.whiten([a[sample.mask_T] for sample, a in zip(samples, advantages)])
    return [torch.zeros_like(a).masked_scatter(s.mask_T, w) for s, a, w in zip(samples, advantages, per_target)]
