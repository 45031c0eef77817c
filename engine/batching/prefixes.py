"""Find the tokens that samples of a micro-batch begin with alike, by comparing them.

A token that several samples begin with has the same input, the same position and the same keys before it in each. So
its activations are the same, and are computed once; its gradient is the sum of the gradients from the samples. Where
experts are given for tokens, activations are the same only if these are: two servers may have routed one prompt in two
ways.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.parallel.ops.prefix_tree import PrefixTree

# Attention to the prompt of a completion is merged with attention to the completion. A shared beginning that saves less
# than this part of the tokens behind it costs more than it saves.
WORTHWHILE = 1 / 16


@dataclass(frozen=True)
class _Document:
    """The parts of a sample that decide the activations of its tokens.

    tokens: token ids, [T] int64. routes: those of `Sample`.
    """

    tokens: Tensor
    routes: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def alike(self, other: "_Document", start: int, stop: int) -> int:
        """Return up to which token the two are alike. start: a token before which they are known to be."""
        if (self.routes is None) != (other.routes is None):
            return start
        different_T = self.tokens[start:stop] != other.tokens[start:stop]
        if self.routes is not None and other.routes is not None:
            different_T = different_T | (self.routes[start:stop] != other.routes[start:stop]).flatten(1).any(1)
        different = different_T.nonzero()
        return start + int(different[0]) if len(different) else stop

    def at(self, place: int) -> object:
        """Return a key that is the same for two samples that are alike at a place; None behind the last token."""
        if place >= len(self.tokens):
            return None
        routes = () if self.routes is None else tuple(self.routes[place].flatten().tolist())
        return int(self.tokens[place]), routes


def fold(tokens: Sequence[Tensor], routes: Sequence[Tensor | None] = ()) -> PrefixTree:
    """Return a row of samples as pieces; each token of each sample is in one of them.

    tokens: tokens of each sample, a document of the row, [T] int64 on the host.
    routes: `Sample.routes` of each; () if none has any.
    """
    every = _documents(tokens, routes)
    lengths: list[int] = []
    parents: list[int] = []
    documents = [-1] * len(tokens)

    def piece(start: int, stop: int, parent: int) -> int:
        lengths.append(stop - start)
        parents.append(parent)
        return len(lengths) - 1

    def grow(samples: tuple[int, ...], start: int, parent: int, first: int) -> None:
        """Add the pieces of samples that are alike before `start`, behind `parent`, which ends at `first`."""
        stop = _alike([every[sample] for sample in samples], start)
        behind = sum(len(tokens[sample]) - stop for sample in samples)
        if stop > first and (len(samples) == 1 or (len(samples) - 1) * (stop - first) > WORTHWHILE * behind):
            parent, first = piece(first, stop, parent), stop
        if len(samples) == 1:
            documents[samples[0]] = parent
            return
        for branch in _branches(every, samples, stop):
            grow(branch, stop, parent, first)

    for branch in _branches(every, range(len(tokens)), 0):
        grow(branch, 0, -1, 0)
    return PrefixTree(tuple(lengths), tuple(parents), tuple(documents))


def shared_beginnings(
    tokens: Sequence[Tensor], groups: Sequence[int], routes: Sequence[Tensor | None] = ()
) -> dict[tuple[int, ...], int]:
    """Return, by samples of a group, the number of tokens that they begin with alike, where sharing these pays.

    groups: the group of each sample; any numbers. tokens, routes: see `fold`.
    """
    every = _documents(tokens, routes)
    members: dict[int, list[int]] = {}
    for sample, group in enumerate(groups):
        members.setdefault(group, []).append(sample)
    shared = {}
    for samples in members.values():
        if len(samples) > 1:
            alike = _alike([every[sample] for sample in samples], 0)
            behind = sum(len(tokens[sample]) - alike for sample in samples)
            if (len(samples) - 1) * alike > WORTHWHILE * behind:
                shared[tuple(samples)] = alike
    return shared


def with_owned_tokens(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with `owned_T`: the tokens that no earlier sample of its trajectory begins with, so that each
    token of the trajectory's tree is owned once. Samples that are not cut stay as they are."""
    earlier: dict[int, list[Tensor]] = {}
    owning = []
    for sample in samples:
        if sample.sequence is None:
            owning.append(sample)
            continue
        others = earlier.setdefault(sample.sequence, [])
        seen = max((_alike([_Document(other), _Document(sample.tokens_T)], 0) for other in others), default=0)
        others.append(sample.tokens_T)
        owning.append(replace(sample, owned_T=torch.arange(len(sample)) >= seen))
    return owning


def _documents(tokens: Sequence[Tensor], routes: Sequence[Tensor | None]) -> list[_Document]:
    return [*map(_Document, tokens, routes or [None] * len(tokens))]


def _alike(documents: Sequence[_Document], start: int) -> int:
    """Return the number of tokens that samples begin with alike; the tokens before `start` are known to be."""
    stop = min(map(len, documents))
    for other in documents[1:]:
        stop = documents[0].alike(other, start, stop)
    return stop


def _branches(documents: Sequence[_Document], samples: Sequence[int], at: int) -> list[tuple[int, ...]]:
    """Return groups of samples that are alike at `at`, in the order of their first one; an ended one is alone."""
    branches: dict[object, list[int]] = {}
    for sample in samples:
        branches.setdefault(documents[sample].at(at), []).append(sample)
    ended = [(sample,) for sample in branches.pop(None, [])]
    return [*ended, *map(tuple, branches.values())]
