"""What samples of a micro-batch share: the tokens that they begin with, found by comparing them.

A token that several samples begin with has the same input, the same position and the same keys before it in each. So
its activations are the same, and are computed once; its gradient is the sum of what the samples send back to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from isoloss.engine.batching.balance import Shared

# Attention merges what a completion sees of its prompt with what it sees of itself. A shared beginning that saves less
# than this part of the tokens behind it costs more than it saves.
WORTHWHILE = 1 / 16


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `stop` of each of its samples, which go on from the piece `parent` (-1: from nothing)."""

    samples: tuple[int, ...]
    start: int
    stop: int
    parent: int

    def __len__(self) -> int:
        return self.stop - self.start


def fold(tokens: Sequence[Tensor]) -> list[Piece]:
    """The pieces of these samples, depth first, each token of each sample in one of them.

    tokens: of each sample, [T] int64 on the host.
    """
    pieces: list[Piece] = []

    def grow(samples: tuple[int, ...], start: int, parent: int) -> None:
        """The pieces of samples that are alike before `start`, behind `parent`, whose tokens end there or later."""
        if len(samples) > 1:
            stop = _alike([tokens[sample] for sample in samples], start)
            behind = sum(len(tokens[sample]) - stop for sample in samples)
            first = pieces[parent].stop if parent >= 0 else 0
            if stop > first and (len(samples) - 1) * (stop - first) > WORTHWHILE * behind:
                pieces.append(Piece(samples, first, stop, parent))
                parent = len(pieces) - 1
            for branch in _branches(tokens, samples, stop):
                grow(branch, stop, parent)
            return
        sample = min(samples)
        first = pieces[parent].stop if parent >= 0 else 0
        if first < len(tokens[sample]):
            pieces.append(Piece(samples, first, len(tokens[sample]), parent))

    for branch in _branches(tokens, range(len(tokens)), 0):
        grow(branch, 0, -1)
    return pieces


def unfolded(lengths: Sequence[int]) -> list[Piece]:
    """A piece for each sample."""
    return [Piece((sample,), 0, length, -1) for sample, length in enumerate(lengths)]


def shared_beginnings(tokens: Sequence[Tensor], groups: Sequence[int]) -> list[Shared]:
    """What the samples of each group begin with alike, where it pays. groups: of each sample; any numbers."""
    members: dict[int, list[int]] = {}
    for sample, group in enumerate(groups):
        members.setdefault(group, []).append(sample)
    shared = []
    for samples in members.values():
        if len(samples) > 1:
            alike = _alike([tokens[sample] for sample in samples], 0)
            behind = sum(len(tokens[sample]) - alike for sample in samples)
            if (len(samples) - 1) * alike > WORTHWHILE * behind:
                shared.append(Shared(tuple(samples), alike))
    return shared


def _alike(tokens: Sequence[Tensor], start: int) -> int:
    """How many tokens they begin with are the same in all; those before `start` are."""
    stop = min(map(len, tokens))
    for other in tokens[1:]:
        different = (tokens[0][start:stop] != other[start:stop]).nonzero()
        stop = start + int(different[0]) if len(different) else stop
    return stop


def _branches(tokens: Sequence[Tensor], samples: Sequence[int], at: int) -> list[tuple[int, ...]]:
    """Those whose token at this place is the same, in the order of their first; one that has none is alone, unless it
    is the same as another."""
    found: dict[int, list[int]] = {}
    for sample in samples:
        found.setdefault(int(tokens[sample][at]) if at < len(tokens[sample]) else -1, []).append(sample)
    ended = [(sample,) for sample in found.pop(-1, [])]
    return [*ended, *map(tuple, found.values())]
