"""Micro-batches that the chunks of a stage share, one of which is made ahead."""

import weakref
from collections.abc import Iterator, Sequence

from isoloss.parallel.schedule import OneAhead


class Thing:
    def __init__(self, number: int):
        self.number = number


class Made(Sequence):
    """Six things, made when they are asked for. made: their numbers; alive: of those that somebody still holds."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self._alive: weakref.WeakSet[Thing] = weakref.WeakSet()

    @property
    def alive(self) -> set[int]:
        return {thing.number for thing in self._alive}

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index):
        thing = Thing(range(6)[index])
        self.made.append(thing.number)
        self._alive.add(thing)
        return thing


def take(things: Iterator[Thing]) -> int:
    return next(things).number


def test_each_is_made_once_and_kept_until_the_last_has_taken_it():
    things = Made()
    first, second = OneAhead(things, 2).iterators
    assert (take(first), take(first), things.alive) == (0, 1, {0, 1})
    assert (take(second), things.alive) == (0, {1})
    assert (take(second), things.alive) == (1, set())
    assert ([take(second) for _ in range(4)], things.alive) == ([2, 3, 4, 5], {2, 3, 4, 5})
    assert ([take(first) for _ in range(4)], things.alive) == ([2, 3, 4, 5], set())
    assert next(first, None) is next(second, None) is None
    assert things.made == [0, 1, 2, 3, 4, 5]


def test_one_is_made_ahead_whichever_chunk_asks():
    """As an interleaved stage goes on: two micro-batches through the first chunk, then through the second."""
    things = Made()
    ahead = OneAhead(things, 2)
    first, second = ahead.iterators
    seen = []
    for chunk in (first, first, second, second, first, first, second, second, first, first, second, second):
        number = take(chunk)
        ahead.make_next()
        ahead.make_next()
        seen.append((number, things.made[-1], len(things.alive)))
    # number, the last one made, how many are held: those that the second chunk still has to take, and one ahead
    assert seen[:4] == [(0, 1, 2), (1, 2, 3), (0, 2, 2), (1, 2, 1)]
    assert seen[4:8] == [(2, 3, 2), (3, 4, 3), (2, 4, 2), (3, 4, 1)]
    assert seen[8:] == [(4, 5, 2), (5, 5, 2), (4, 5, 1), (5, 5, 0)]
    assert things.made == [0, 1, 2, 3, 4, 5]
