"""Record every prompt that a run draws, and its fate, for checkpoints: no prompt is lost or taken twice."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Why = Literal["no_variance", "reward_failed", "faulted"]
Finished = Literal["first", "left_over"]
REASONS: tuple[Why, ...] = ("no_variance", "reward_failed", "faulted")


@dataclass
class Ledger:
    """The prompts drawn, alike on every rank. The number of a draw is the number of prompts drawn before it.

    drawn: number of prompts drawn.
    in_flight: draws that are in no batch yet and not dropped, the oldest first.
    trained: number of groups that went into a batch.
    dropped: number of groups left out, for having no variance, since no completion could be rewarded, or since faults
        of an environment left fewer than two rewards.
    left_over: draws in flight that a batch did not wait for (rollout.over_sample). times_left_over: total so far.
    lengths: tokens and completions of groups that were among the first to finish, and of groups that were left over.
    batches: versions of the weights that the newest batches began with, the newest last.
    """

    drawn: int = 0
    in_flight: list[int] = field(default_factory=list)
    trained: int = 0
    dropped: dict[Why, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    left_over: list[int] = field(default_factory=list)
    times_left_over: int = 0
    lengths: dict[Finished, list[int]] = field(default_factory=lambda: {"first": [0, 0], "left_over": [0, 0]})
    batches: list[int] = field(default_factory=list)

    def draw(self, count: int) -> None:
        """Draw `count` new prompts."""
        self.in_flight += range(self.drawn, self.drawn + count)
        self.drawn += count

    def train(self, draw: int) -> None:
        self.in_flight.remove(draw)
        self.trained += 1

    def drop(self, draw: int, why: Why) -> None:
        self.in_flight.remove(draw)
        self.dropped[why] = self.dropped.get(why, 0) + 1

    def race(self, lengths: Mapping[int, Sequence[int]], others: Sequence[int]) -> None:
        """Record groups that were taken because they finished first or had been left over before.

        lengths: tokens of each of their completions, by draw. others: draws that are left over now.
        """
        for draw, of_group in lengths.items():
            total = self.lengths["left_over" if draw in self.left_over else "first"]
            total[0] += sum(of_group)
            total[1] += len(of_group)
        self.left_over = list(others)
        self.times_left_over += len(others)

    def begin_batch(self, version: int, remembered: int) -> None:
        """Record the version of the weights that a batch begins with. remembered: largest staleness of a token."""
        self.batches = [*self.batches, version][-(remembered + 1) :]

    def staleness(self, versions: Iterable[int]) -> list[int]:
        """Return the staleness of tokens of each version: the number of batches that began with newer weights."""
        return [sum(begun > version for begun in self.batches) for version in versions]

    def counts(self) -> dict[str, int]:
        """Return numbers of prompts, by the names of metrics: all drawn, and how many of them are in each state."""
        assert self.drawn == self.trained + sum(self.dropped.values()) + len(self.in_flight), self
        return {
            "prompts_drawn": self.drawn,
            "prompts_trained": self.trained,
            "prompts_in_flight": len(self.in_flight),
            **{f"prompts_dropped_{why}": count for why, count in self.dropped.items()},
            "prompts_left_over": self.times_left_over,
        }

    def mean_lengths(self) -> dict[str, float]:
        """Return the mean tokens of the completions that finished first, and of all that competed, by metric."""
        (first, of_first), (left, of_left) = self.lengths["first"], self.lengths["left_over"]
        both = (first + left) / max(of_first + of_left, 1)
        return {"response_length_first": first / max(of_first, 1), "response_length_competing": both}

    def state(self) -> dict[str, object]:
        """Return plain containers for a checkpoint."""
        return {
            "drawn": self.drawn,
            "in_flight": list(self.in_flight),
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "left_over": list(self.left_over),
            "times_left_over": self.times_left_over,
            "lengths": {name: list(total) for name, total in self.lengths.items()},
            "batches": list(self.batches),
        }

    @classmethod
    def from_state(cls, state: Mapping) -> "Ledger":
        return cls(**state)
