"""Make rewarded trajectories the samples of the optimizer steps that they feed.

Shape suffixes: S trajectories of the batch, T tokens of one sample, C targets of one trajectory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from isoloss.engine.batching.distribute import Scatter
from isoloss.engine.batching.prefixes import with_owned_tokens
from isoloss.engine.batching.sample import Sample, sequence_numbers
from isoloss.engine.instruments.profiling import phase
from isoloss.engine.rl import advantages as estimators
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig
from isoloss.engine.rl.credit import Cut, estimate
from isoloss.engine.rl.critic import Critic
from isoloss.engine.rl.losses import importance_weights, kl_estimator
from isoloss.engine.rl.paths import paths_of
from isoloss.engine.rl.reference import Reference
from isoloss.engine.rl.trajectory import Group, Trajectory
from isoloss.engine.step.engine import Engine


@dataclass(frozen=True)
class Models:
    """The models that prepare a batch. scatter: carrier of samples from rank 0 to the ranks that compute them."""

    scatter: Scatter
    policy: Engine
    reference: Reference | None
    critic: Critic | None


@dataclass(frozen=True)
class RolloutBatch:
    """A generated batch, and the number of its steps that are done. Rank 0 has its samples, the others outlines.

    steps: indices of the samples of each optimizer step.
    done: number of steps that have been taken.
    stats: metrics of the batch.
    """

    samples: tuple[Sample, ...] = ()
    steps: tuple[tuple[int, ...], ...] = ()
    stats: Mapping[str, float] = field(default_factory=dict)
    done: int = 0

    @property
    def exhausted(self) -> bool:
        return self.done == len(self.steps)

    def next(self) -> tuple[list[Sample], "RolloutBatch"]:
        """Return the samples of the next optimizer step, and the batch after that step."""
        return [self.samples[index] for index in self.steps[self.done]], replace(self, done=self.done + 1)

    def state(self) -> dict[str, object]:
        """Return plain containers and tensors for a checkpoint: amid a batch its samples and steps, whole on rank 0;
        after its last step nothing."""
        if self.exhausted:
            return {"experience": None}
        samples = [sample.values() for sample in self.samples]
        steps = [list(step) for step in self.steps]
        rest = {"samples": samples, "steps": steps, "stats": dict(self.stats), "done": self.done}
        return {"experience": rest}

    @classmethod
    def from_state(cls, state: Mapping, scatter: Scatter) -> "RolloutBatch":
        """Restore a batch. state: `state` of rank 0; other ranks may have the same. Collective over the world."""
        rest = state["experience"]
        if rest is None:
            return cls()
        samples = tuple(scatter.make(lambda: [Sample(*sample) for sample in rest["samples"]]))
        return cls(samples, tuple(map(tuple, rest["steps"])), rest["stats"], rest["done"])


@phase("log-probabilities")
def with_logprobs(groups: Sequence[Group], models: Models, config: RLConfig) -> list[Sample]:
    """Return the completions as samples, with fields that the models compute for each token; outlines on ranks but 0.

    rollout_logprobs: log-probabilities from the backend.
    train_logprobs: log-probabilities from the policy, where the first optimizer step will not compute the same ones.
    ref_logprobs: log-probabilities from the initial policy.
    old_values: values from the critic.
    Collective over the world, through the models: each passes over packed micro-batches of the trainer's plan.

    A completion that mask_truncated masks is not learned from, but its reward is in its group's mean, less the KL
    penalty where the reward has one. The models then compute its tokens too, in the same passes.
    """
    algorithm, temperature, scatter = config.algorithm, config.rollout.temperature, models.scatter
    kl_in_reward = algorithm.uses_reference and algorithm.kl_in == "reward"
    learned = scatter.make(lambda: to_samples(groups, algorithm))
    asked = learned
    if kl_in_reward:
        asked = scatter.make(lambda: to_samples(groups, replace(algorithm, mask_truncated=False)))
    # Routes are the policy's: the reference says what it would do itself, and the critic has experts of its own.
    of_others = scatter.hold(without_routes(asked))
    asked, answers = scatter.hold(asked), dict[str, list[Tensor]]()

    def keep(name: str, values: list[Tensor]) -> None:
        if scatter.here:
            answers[name] = on_the_host(values)

    before_steps = config.steps_per_batch > 1 or algorithm.rejected == "removed"
    if kl_in_reward or (algorithm.old_logprobs == "train" and before_steps):
        keep("train_logprobs", models.policy.logprobs(asked, temperature))
    if models.reference is not None:
        keep("ref_logprobs", models.reference.logprobs(of_others, temperature))
    if models.critic is not None:
        keep("old_values", models.critic.values(of_others))
    return scatter.make(lambda: with_fields(learned, answers))


def without_routes(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples, or outlines, for a model that routes for itself."""
    return [sample if sample.routes is None else replace(sample, routes=None) for sample in samples]


def with_fields(samples: Sequence[Sample], fields: Mapping[str, Sequence[Tensor]]) -> list[Sample]:
    """Return the samples with further fields. fields: values of each sample, by name of the field."""
    added = [{name: values[index] for name, values in fields.items()} for index in range(len(samples))]
    return [replace(sample, fields={**sample.fields, **more}) for sample, more in zip(samples, added)]


def on_the_host(values: list[Tensor]) -> list[Tensor]:
    """Return the values of each sample, [T], copied from the device in one copy."""
    if not values or values[0].device.type == "cpu":
        return values
    return [*torch.cat(values).cpu().split([len(each) for each in values])]


def with_advantages(samples: Sequence[Sample], groups: Sequence[Group], config: RLConfig) -> list[Sample]:
    """Return the samples with `advantages`, with a critic `returns`, and what `with_importance` and `with_owned_tokens`
    add. Fields are 0 where a token is no target, except rollout_logprobs.

    samples: samples of all groups, from one call of `with_logprobs` or several.
    """
    algorithm = config.algorithm
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    group_S = torch.tensor([index for index, group in enumerate(groups) for _ in group.trajectories])
    in_reward = algorithm.uses_reference and algorithm.kl_in == "reward"
    penalty = [kl_penalty(sample.fields, algorithm) if in_reward else None for sample in samples]
    fields = [
        {name: value if name == "rollout_logprobs" else value * sample.mask_T for name, value in sample.fields.items()}
        for sample in samples
    ]
    numbers = sequence_numbers(samples)
    rewards_S = shaped_rewards(trajectories, config)
    cut = Cut(samples, trajectories, numbers)
    estimated = estimate(cut, rewards_S, group_S, penalty, fields, config)
    learned = [
        replace(sample, group=int(group_S[number]), fields={**kept, **added})
        for sample, number, kept, added in zip(samples, numbers, fields, estimated)
    ]
    return with_owned_tokens(with_importance(learned, algorithm))


def with_importance(samples: Sequence[Sample], algorithm: AlgorithmConfig) -> list[Sample]:
    """Return the samples with the field `importance`, where the loss cannot compute it from their targets alone: with
    algorithm.rejected=removed, whose rejected tokens are then no targets and have fields of 0; and where trajectories
    are cut into samples and their sums are constants.

    samples: all samples of a batch, with train_logprobs if these were computed.
    """
    known = algorithm.old_logprobs == "train" and all("train_logprobs" in sample.fields for sample in samples)
    sequence_of = sequence_numbers(samples)
    removes, cut = algorithm.rejected == "removed", len({*sequence_of}) < len(samples)
    if not (algorithm.corrects and known and (removes or cut)):
        return [*samples]
    at = [sample.mask_T for sample in samples]
    sequence_N = torch.tensor(sequence_of).repeat_interleave(torch.tensor([int(mask_T.sum()) for mask_T in at]))

    def sequence_sum(values_N: Tensor) -> Tensor:
        return values_N.new_zeros(len(samples)).index_add(0, sequence_N, values_N)[sequence_N]

    train, backend = (
        torch.cat([sample.fields[name][mask_T] for sample, mask_T in zip(samples, at)])
        for name in ("train_logprobs", "rollout_logprobs")
    )
    weights_N = importance_weights(train - backend, sequence_sum, algorithm)
    weighted = []
    for sample, mask_T, of_sample in zip(samples, at, weights_N.split([int(mask_T.sum()) for mask_T in at])):
        weights_T = torch.zeros(len(sample), dtype=torch.float64).masked_scatter(mask_T, of_sample)
        kept_T = mask_T & (weights_T != 0) if removes else mask_T
        fields = {
            name: values if name == "rollout_logprobs" else values * kept_T for name, values in sample.fields.items()
        }
        weighted.append(replace(sample, mask_T=kept_T, fields={**fields, "importance": weights_T}))
    return weighted


def removed_fraction(before: Sequence[Sample], after: Sequence[Sample]) -> float:
    """Return the share of targets that algorithm.rejected=removed took away."""
    targets, kept = (sum(int(sample.mask_T.sum()) for sample in samples) for samples in (before, after))
    return (targets - kept) / max(targets, 1)


def to_samples(groups: Sequence[Group], algorithm: AlgorithmConfig) -> list[Sample]:
    """Return the samples of every trajectory, with `rollout_logprobs`."""
    made = []
    for index, group in enumerate(groups):
        for k, trajectory in enumerate(group.trajectories):
            made += samples_of(trajectory, index, algorithm, group.draw * len(group.trajectories) + k)
    return made


def samples_of(trajectory: Trajectory, group: int, algorithm: AlgorithmConfig, sequence: int) -> list[Sample]:
    """Return a sample for each path of the trajectory. Targets are the tokens of its completions, but of those that
    are masked: all of a trajectory without a reward, and with mask_truncated those that were cut.

    sequence: number of the trajectory; a trajectory that is one sample needs none.
    """
    masked = [
        not trajectory.valid or (algorithm.mask_truncated and turn.completion.finish == "length")
        for turn in trajectory.turns
    ]
    learned = np.array([*np.logical_not(masked), False])  # the last for -1: no target of this path
    paths, made = paths_of(trajectory), []
    for path in paths:
        mask_T = torch.from_numpy(learned[path.turn_T])
        fields = {"rollout_logprobs": torch.from_numpy(path.logprobs_T)}
        whole = None if len(paths) == 1 else sequence
        routes = None if path.routes is None else torch.from_numpy(path.routes)
        tokens_T = torch.from_numpy(path.tokens_T)
        made.append(Sample(tokens_T, mask_T, group, fields, trajectory.id, whole, routes=routes))
    return made


def shaped_rewards(trajectories: Sequence[Trajectory], config: RLConfig) -> Tensor:
    """Return the rewards, 0 where not valid, plus DAPO's soft punishment of overlong trajectories, [S]."""
    rewards_S = torch.tensor([t.reward if t.valid else 0.0 for t in trajectories], dtype=torch.float64)
    lengths_S = torch.tensor([t.length for t in trajectories])
    punishment_S = estimators.overlong_punishment(lengths_S, config.trajectory_tokens, config.algorithm.overlong_buffer)
    return rewards_S + config.algorithm.overlong_penalty * punishment_S


def kl_penalty(fields: Mapping[str, Tensor], algorithm: AlgorithmConfig) -> Tensor:
    """Return kl_coef times the estimated divergence from the initial policy at each token, [T]."""
    log_ratio_T = fields["ref_logprobs"] - fields["train_logprobs"]
    return algorithm.kl_coef * kl_estimator(algorithm)(log_ratio_T)


def minibatches(
    groups: Sequence[int], step: int, config: RLConfig, sequences: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return indices of the samples of each optimizer step: for each epoch all of them, in algorithm.minibatches parts.

    groups: number of each sample's prompt.
    sequences: number of each sample's trajectory, whose samples stay together; None: each sample is a trajectory.
    Shuffled by (seed, first step, epoch), one by one, so that completions of a prompt are spread over the parts, or by
    prompt (algorithm.minibatch_by): no part holds only easy prompts. A batch that dynamic sampling left smaller is cut
    into the most parts, up to algorithm.minibatches, that are of one size: every step is a mean, so a completion of a
    smaller part would weigh more.
    """
    together = range(len(groups)) if sequences is None else sequences
    units: dict[int, list[int]] = {}
    for index, unit in enumerate(groups if config.algorithm.minibatch_by == "prompt" else together):
        units.setdefault(unit, []).append(index)
    dealt = list(units.values())
    steps, parts = [], max(n for n in range(1, config.algorithm.minibatches + 1) if len(dealt) % n == 0)
    for epoch in range(config.algorithm.epochs):
        order = np.random.default_rng([config.train.seed, step, epoch]).permutation(len(dealt))
        steps += [tuple(i for unit in part for i in dealt[unit]) for part in np.array_split(order, parts)]
    return tuple(steps)
