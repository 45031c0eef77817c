"""Choose the rows of several sources by weights, as a pure function of (seed, index)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isoloss.engine.config.data_config import DataConfig, WeightedFile
from isoloss.parallel.runtime.errors import UserError


@dataclass(frozen=True)
class Mixture:
    """The sources of data.train, whose rows follow one another.

    names: names of the sources, for messages. sizes: number of rows of each. weights: positive numbers of any sum.

    The source of draw i is the one that gets seat i where seats are apportioned to `weights` by the method of Webster,
    also called Sainte-Lague (Balinski and Young, Fair Representation, 1982): draw k of a source stands at
    (k + 1/2) / weight, and draws follow in the order of these numbers. So the counts in every beginning of the stream
    are its shares, rounded, up to a draw or so; independent random draws would be off by the root of their number. The
    order is not shuffled, as that could only make the counts worse.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Return the share of each source in the samples."""
        return tuple(weight / sum(self.weights) for weight in self.weights)

    def draw(self, start: int, count: int, seed: int) -> np.ndarray:
        """Return draws `start` to `start + count` of the stream, as rows of all sources: int64 [count].

        Each source is a permutation of its rows per epoch of its own, one after the other.
        """
        sources, numbers = self.sources(start, count)
        rows, before = np.empty(count, np.int64), 0
        for source, size in enumerate(self.sizes):
            of_source = sources == source
            wanted = numbers[of_source]
            drawn = [_permuted(size, seed, int(epoch), source) for epoch in np.unique(wanted // size)]
            if drawn:
                rows[of_source] = before + np.concatenate(drawn)[wanted - wanted[0] // size * size]
            before += size
        return rows

    def sources(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each draw, and its number among the draws of that source: int64 [count] each."""
        done = self._counts_below(max(0.0, float(start - len(self.sizes))))
        ahead = start - sum(done)  # draws before the first one wanted: at most two of each source
        assert ahead >= 0, (self, start)
        numbers = [first + np.arange(ahead + count) for first in done]
        sources = np.repeat(np.arange(len(numbers)), ahead + count)
        all_numbers = np.concatenate(numbers)
        times = _time(all_numbers, np.array(self.shares)[sources])
        wanted = np.lexsort((sources, times))[ahead : ahead + count]
        return sources[wanted], all_numbers[wanted]

    def counts(self, draws: int) -> tuple[int, ...]:
        """Return the number of draws from each source among the first `draws` of the stream."""
        if not draws:
            return (0,) * len(self.sizes)
        sources, numbers = self.sources(draws - 1, 1)
        last = float(_time(numbers, np.array(self.shares)[sources])[0])
        # At the same time, the sources before have had their draw.
        return tuple(
            self._count_below(source, last) + (source <= sources[0] and self._at(source, last))
            for source in range(len(self.sizes))
        )

    def _counts_below(self, time: float) -> list[int]:
        return [self._count_below(source, time) for source in range(len(self.sizes))]

    def _count_below(self, source: int, time: float) -> int:
        """Return the number of draws of a source that stand before a time."""
        share = self.shares[source]
        count = max(0, int(time * share) - 1)  # too few, whatever the rounding
        while _time(count, share) < time:
            count += 1
        return count

    def _at(self, source: int, time: float) -> bool:
        return _time(self._count_below(source, time), self.shares[source]) == time

    def fingerprint(self) -> str:
        """Return the rows and shares of all sources, which decide the stream."""
        return " + ".join(f"{size} rows x {share!r}" for size, share in zip(self.sizes, self.shares))

    def lines(self, draws: int, row: str, bound: str = "") -> list[str]:
        """Return a line for the user about each source.

        draws: length of the run. row: a word for a row. bound: "at least " where the run may draw more.
        """
        return [
            f"mixture: {name}: {size:,} {row}s, weight {weight:g}, {share:.2%} of the {row}s drawn, {bound}"
            f"{drawn:,} in this run: {drawn / size:.2f} epochs"
            for name, size, weight, share, drawn in zip(
                self.names, self.sizes, self.weights, self.shares, self.counts(draws)
            )
        ]

    def repeat_lines(self, taken: int, row: str, step: str) -> list[str]:
        """Return a line for the user about each source of whose rows a step takes each several times.

        taken: rows of a step, batch.global_size. row, step: words for a row and a step.
        """
        return [
            f"data: a {step} takes every {row} of {name} {taken * share / size:.1f} times: {share:.2%} of "
            f"batch.global_size={taken:,} is more than its {size:,} {row}s"
            for name, size, share in zip(self.names, self.sizes, self.shares)
            if taken * share > size
        ]


def _time(number, share):
    """Return where draw `number` of a source stands; increasing, and the same for arrays as for numbers."""
    return (number + 0.5) / share


def _permuted(size: int, seed: int, epoch: int, source: int) -> np.ndarray:
    # Of the first source, these are the permutations of rows without weights: numpy pads seeds with zeros.
    return np.random.default_rng([seed, epoch, source]).permutation(size)


def mixture_of(data: DataConfig, files: np.ndarray, sources: Sequence[int]) -> Mixture | None:
    """Return the mixture of data.train; None without weights. Raises UserError for a source without rows.

    files: for each row, the index of its file. sources: the index of each file's source.
    """
    weighted = [file for file in data.train if isinstance(file, WeightedFile)]
    if not weighted:
        return None
    sizes = np.zeros(len(weighted), np.int64)
    for file, count in zip(*np.unique(files, return_counts=True)):
        sizes[sources[int(file)]] += count
    for file, size in zip(weighted, sizes):
        if not size:
            raise UserError(f"data.train: {file.path} has a weight of {file.weight:g}, but no row of it is left")
    names, weights = zip(*((file.path, file.weight) for file in weighted))
    return Mixture(names, tuple(sizes.tolist()), weights)


def order_of(rows: int, mixture: Mixture | None) -> "int | Mixture":
    """Return what `step_indices` draws from: the number of rows, or their mixture."""
    return rows if mixture is None else mixture


def content(fingerprint: str, mixture: Mixture | None) -> str:
    """Return what a resumed run must not change of data.train: the fingerprint of its rows, and their mixture."""
    return fingerprint if mixture is None else f"{fingerprint} as {mixture.fingerprint()}"


def told(mixture: Mixture | None, draws: int, row: str, bound: str = "") -> Sequence[str]:
    """Return the mixture's lines for the user; none without a mixture."""
    return mixture.lines(draws, row, bound) if mixture else ()
