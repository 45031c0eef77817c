"""Warn of faults of a reinforcement learning run that its rows of metrics show: see `run.health`."""

import math
import statistics
from collections.abc import Callable

from isoloss.engine.rl.algorithms import advantage_of
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.run.health import Row, Watched

FIRST_STEPS = 10  # their median lengths and entropies are a run's first values
LONGER, LESS_ENTROPY = 2.0, 0.1  # against the first steps
MISMATCH = 0.1  # nats a token between trainer and backend; bf16 makes about a tenth of it
STEADY_BATCHES = 10  # with the same mean of a part of the reward
FIRST_ERROR = "first_reward_error"  # in a row that checks get: the first error of a reward function


def watched(config: RLConfig) -> Watched:
    varied = by_group if advantage_of(config.algorithm.advantage).compares else by_batch
    return Watched(
        varied,
        (
            NoVariance(config, varied),
            reward_errors,
            reward_timeouts,
            no_tool_calls,
            Truncated(config),
            no_target,
            Longer(),
            LessEntropy(),
            Mismatch(config),
            ConstantParts(config.steps_per_batch),
        ),
    )


def by_group(row: Row) -> bool:
    """Return whether the completions of some prompt have different rewards."""
    return row["groups_without_variance"] < row["groups_drawn"]


def by_batch(row: Row) -> bool:
    """Return whether some completions have different rewards, as advantages that compare over the batch need."""
    return row["reward_std"] > 0


class NoVariance:
    """Warn that rewards do not differ, which leaves nothing to compare."""

    def __init__(self, config: RLConfig, varied: Callable[[Row], bool]):
        self._advantage, self._varied = config.algorithm.advantage, varied

    def __call__(self, row: Row) -> str | None:
        if self._varied(row):
            return None
        of = f"in none of {row['groups_drawn']:,} groups" if self._varied is by_group else "between no two completions"
        return (
            f"rewards differ {of} (their mean is {row['reward_mean']:.3g}), so algorithm.advantage={self._advantage} "
            "has nothing to compare: choose prompts of medium difficulty, raise rollout.num_generations or "
            "rollout.temperature, or look at reward.function"
        )


def reward_errors(row: Row) -> str | None:
    if not row["reward_errors"]:
        return None
    first = f"; the first: {row[FIRST_ERROR]}" if row.get(FIRST_ERROR) else ""
    return (
        f"{row['reward_errors']:,} completions of the batch have no reward and are masked{first}; fix reward.function, "
        "or the rows that it fails on"
    )


def no_tool_calls(row: Row) -> str | None:
    if not row.get("turns_with_tools") or row["tool_calls"]:
        return None
    return (
        f"no call of a tool was found in {row['turns_with_tools']:,} turns with tools: see in rollouts.jsonl "
        "what the model writes, and whether agent.tool_parser reads that"
    )


def reward_timeouts(row: Row) -> str | None:
    if not row["reward_timeouts"]:
        return None
    return (
        f"the verification of {row['reward_timeouts']:,} completions of the batch ran out of time, which gives them 0: "
        "raise reward.timeout, or reward.workers where the machine is busy"
    )


class Truncated:
    """Warn that many completions are cut off, so that few of them can be right."""

    def __init__(self, config: RLConfig):
        self._most, self._masked = config.rollout.max_new_tokens, config.algorithm.mask_truncated

    def __call__(self, row: Row) -> str | None:
        share = row["truncated_fraction"]
        if share < 0.5:
            return None
        which = "all completions were" if share == 1 else f"{share:.0%} of the completions were"
        masked = ", and algorithm.mask_truncated=true masks them" if self._masked else ""
        return (
            f"{which} truncated at rollout.max_new_tokens={self._most}{masked}: raise it with data.max_length, or see "
            "in rollouts.jsonl whether the model ends its turns"
        )


def no_target(row: Row) -> str | None:
    if row["valid_tokens"]:
        return None
    return (
        "no token was a target, so nothing is learned: every completion was masked, for its reward "
        "(reward.function) or its length (algorithm.mask_truncated)"
    )


class FirstSteps:
    """The median of a number over the first steps of a run."""

    def __init__(self):
        self._values: list[float] = []

    def median(self, now: float) -> float | None:
        """Return the median of the first FIRST_STEPS values; None while `now` is one of them."""
        if len(self._values) < FIRST_STEPS:
            self._values.append(now)
            return None
        return statistics.median(self._values)


class Longer:
    """Warn that completions have become long."""

    def __init__(self):
        self._first = FirstSteps()

    def __call__(self, row: Row) -> str | None:
        mean = row["response_length_mean"]
        before = self._first.median(mean)
        if before is None or mean < LONGER * before:
            return None
        return (
            f"completions have {mean:,.0f} tokens, and had {before:,.0f} in the first steps: if that is not what you "
            "want, set algorithm.overlong_buffer, or look at what the reward gives for length"
        )


class LessEntropy:
    """Warn that the policy has almost stopped exploring."""

    def __init__(self):
        self._first = FirstSteps()

    def __call__(self, row: Row) -> str | None:
        entropy = row["entropy"]
        if not row["valid_tokens"]:  # of no token
            return None
        before = self._first.median(entropy)
        if before is None or not entropy < LESS_ENTROPY * before:
            return None
        return (
            f"the entropy is {entropy:.3g}, and was {before:.3g} in the first steps: completions of a prompt become "
            "alike; raise algorithm.clip_high, algorithm.entropy_coef or algorithm.kl_coef, or lower optim.lr"
        )


class Mismatch:
    """Warn that trainer and backend compute different log-probabilities for the same tokens and weights."""

    def __init__(self, config: RLConfig):
        algorithm = config.algorithm
        # Otherwise the metric also contains the change of the policy.
        rollout_ratio = algorithm.old_logprobs == "rollout" and config.steps_per_batch > 1
        self._meaningful = config.rollout.max_staleness == 0 and not rollout_ratio
        can_correct = algorithm.old_logprobs == "train" and algorithm.importance == "none"
        self._hint = "set algorithm.importance=token, and " if can_correct else ""

    def __call__(self, row: Row) -> str | None:
        difference = row["train_rollout_logprob_diff"]
        if not (self._meaningful and difference > MISMATCH):
            return None
        return (
            f"log-probabilities of trainer and backend differ by {difference:.3g} nats a token "
            f"(train_rollout_logprob_diff): {self._hint}compare train.precision with the precision of rollout.backend"
        )


class ConstantParts:
    """Warn of a part of the reward with the same mean in batch after batch: all completions get the same."""

    def __init__(self, steps_per_batch: int):
        self._steps = STEADY_BATCHES * steps_per_batch
        self._runs: dict[str, tuple[float, int]] = {}  # the mean of a part, and for how many steps

    def __call__(self, row: Row) -> str | None:
        for name, mean in row.items():
            if name.startswith("reward/"):
                before, steps = self._runs.get(name, (math.nan, 0))
                same = math.isclose(mean, before, rel_tol=1e-9)
                self._runs[name] = (mean, steps + 1 if same else 1)
        steady = {name: mean for name, (mean, steps) in self._runs.items() if steps >= self._steps}
        if not steady:
            return None
        told = ", ".join(f"{name.removeprefix('reward/')} has been {mean:.3g}" for name, mean in steady.items())
        return (
            f"a part of the reward does not vary ({told} in {STEADY_BATCHES} batches), and teaches nothing: see "
            "reward.function and reward.weights"
        )
