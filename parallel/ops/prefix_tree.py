"""Documents of a packed row that begin alike: a tree of pieces."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class PrefixTree:
    """A packed row as pieces of documents, depth first. Documents that begin alike share the piece that they begin
    with: a document is a way from a root to a leaf, and positions go on along it.

    lengths: tokens of each piece; each is cut over the ring as a document is.
    parents: the piece that each goes on from, -1: it begins a document. Left out: every piece is a document.
    documents: the last piece of each document, where documents are numbered.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...] = ()
    documents: tuple[int, ...] = ()

    @classmethod
    def apart(cls, lengths: Sequence[int]) -> "PrefixTree":
        """Documents that share nothing."""
        return cls(tuple(lengths), (-1,) * len(lengths), tuple(range(len(lengths))))

    def __post_init__(self):
        assert not self.parents or len(self.parents) == len(self.lengths)
        path: list[int] = []  # from a root to the piece before
        for piece, parent in enumerate(self.parents):
            while path and path[-1] != parent:
                path.pop()
            assert path or parent == -1, f"piece {piece} is not depth first: {self.parents}"
            path.append(piece)

    @property
    def shares(self) -> bool:
        """Whether some piece belongs to several documents, or might."""
        return any(parent >= 0 for parent in self.parents)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The position of the first token of each piece."""
        offsets: list[int] = []
        for parent in self.parents or (-1,) * len(self.lengths):
            offsets.append(offsets[parent] + self.lengths[parent] if parent >= 0 else 0)
        return tuple(offsets)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How many pieces come before each in its documents."""
        depths: list[int] = []
        for parent in self.parents or (-1,) * len(self.lengths):
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return tuple(depths)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The first piece behind all that go on from each: those between are its descendants."""
        ends = list(range(1, len(self.lengths) + 1))
        for piece, parent in reversed(list(enumerate(self.parents))):
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[piece])
        return tuple(ends)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The pieces of each of `documents`, the last one first."""
        paths: list[tuple[int, ...]] = []
        for piece in self.documents:
            path = [piece]
            while (piece := self.parents[piece]) >= 0:
                path.append(piece)
            paths.append(tuple(path))
        return tuple(paths)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The positions at which each piece begins and ends."""
        return [(start, start + length) for start, length in zip(self.offsets, self.lengths)]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(map(sum, zip(self.offsets, self.lengths)), default=0)
