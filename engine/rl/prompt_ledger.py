"""Every prompt that a run has drawn, and what became of it. It is part of a checkpoint: none is lost or taken twice."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Why = Literal["no_variance", "reward_failed"]
Finished = Literal["first", "left_over"]
REASONS: tuple[Why, ...] = ("no_variance", "reward_failed")


@dataclass
class Ledger:
    """The same on every rank. A draw is known by its number: how many prompts the run drew before it.

    drawn: prompts so far.
    in_flight: the draws that are in no batch yet and not dropped, the oldest first.
    trained: how many groups went into a batch.
    dropped: how many were generated and left out, for having no variance or since no completion could be rewarded.
    left_over: those in flight that a batch did not wait for (rollout.over_sample). times_left_over: how often that was.
    lengths: tokens and completions of groups that were among the first to finish, and of those that were left over.
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
        """So many new prompts."""
        self.in_flight += range(self.drawn, self.drawn + count)
        self.drawn += count

    def train(self, draw: int) -> None:
        self.in_flight.remove(draw)
        self.trained += 1

    def drop(self, draw: int, why: Why) -> None:
        self.in_flight.remove(draw)
        self.dropped[why] += 1

    def race(self, lengths: Mapping[int, Sequence[int]], others: Sequence[int]) -> None:
        """Some groups of several were taken because they finished first, or because they had been left over before.

        lengths: of the completions of each of them. others: the draws that are left over now.
        """
        for draw, of_group in lengths.items():
            total = self.lengths["left_over" if draw in self.left_over else "first"]
            total[0] += sum(of_group)
            total[1] += len(of_group)
        self.left_over = list(others)
        self.times_left_over += len(others)

    def begin_batch(self, version: int, remembered: int) -> None:
        """version: of the weights that it begins with. remembered: batches that a token may be older than it."""
        self.batches = [*self.batches, version][-(remembered + 1) :]

    def staleness(self, versions: Iterable[int]) -> list[int]:
        """Of tokens that weights of these versions made: how many batches were begun since."""
        return [sum(begun > version for begun in self.batches) for version in versions]

    def counts(self) -> dict[str, int]:
        """By the names of metrics. Every prompt is in one of them."""
        assert self.drawn == self.trained + sum(self.dropped.values()) + len(self.in_flight), self
        return {
            "prompts_drawn": self.drawn,
            "prompts_trained": self.trained,
            "prompts_in_flight": len(self.in_flight),
            **{f"prompts_dropped_{why}": count for why, count in self.dropped.items()},
            "prompts_left_over": self.times_left_over,
        }

    def mean_lengths(self) -> dict[str, float]:
        """By the names of metrics: mean tokens of the completions that finished first, and of all that competed."""
        (first, of_first), (left, of_left) = self.lengths["first"], self.lengths["left_over"]
        both = (first + left) / max(of_first + of_left, 1)
        return {"response_length_first": first / max(of_first, 1), "response_length_competing": both}

    def state(self) -> dict[str, object]:
        """For a checkpoint, in plain containers."""
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
