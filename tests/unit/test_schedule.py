"""Micro-batches that the chunks of a stage share."""

import weakref
from collections.abc import Iterator, Sequence

from isoloss.parallel.schedule import shared_iterators


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
    first, second = shared_iterators(things, 2)
    assert (take(first), take(first), things.alive) == (0, 1, {0, 1})
    assert (take(second), things.alive) == (0, {1})
    assert (take(second), things.alive) == (1, set())
    assert ([take(second) for _ in range(4)], things.alive) == ([2, 3, 4, 5], {2, 3, 4, 5})
    assert ([take(first) for _ in range(4)], things.alive) == ([2, 3, 4, 5], set())
    assert next(first, None) is next(second, None) is None
    assert things.made == [0, 1, 2, 3, 4, 5]
