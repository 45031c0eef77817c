"""Documents of a packed row that share prefixes, as trees of pieces."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class PrefixTree:
    """The pieces of the documents of a packed row, depth first, in one or more trees.

    A document is a path from a root to a leaf, and positions count along this path. Documents with a common prefix
    share its pieces.

    lengths: tokens of each piece. Pieces are cut over the ring as documents are.
    parents: index of the parent of each piece; -1: a root. Empty: every piece is a document.
    documents: the last piece of each document, where documents are numbered; it may be an inner one.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...] = ()
    documents: tuple[int, ...] = field(default=(), repr=False)

    @classmethod
    def apart(cls, lengths: Sequence[int]) -> "PrefixTree":
        """Make a tree of documents that share nothing."""
        return cls(tuple(lengths), (-1,) * len(lengths), tuple(range(len(lengths))))

    def __post_init__(self):
        assert not self.parents or len(self.parents) == len(self.lengths)
        path: list[int] = []  # from a root to the preceding piece
        for piece, parent in enumerate(self.parents):
            while path and path[-1] != parent:
                path.pop()
            assert path or parent == -1, f"piece {piece} is not depth first: {self.parents}"
            path.append(piece)

    @property
    def shares(self) -> bool:
        """Return True if some piece has a parent, so that several documents may share the parent."""
        return any(parent >= 0 for parent in self.parents)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Compute the position of the first token of each piece."""
        offsets: list[int] = []
        for parent in self.parents or (-1,) * len(self.lengths):
            offsets.append(offsets[parent] + self.lengths[parent] if parent >= 0 else 0)
        return tuple(offsets)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Count the ancestors of each piece."""
        depths: list[int] = []
        for parent in self.parents or (-1,) * len(self.lengths):
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return tuple(depths)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Compute for each piece the index of the first later piece that is not its descendant."""
        ends = list(range(1, len(self.lengths) + 1))
        for piece, parent in reversed(list(enumerate(self.parents))):
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[piece])
        return tuple(ends)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Return the pieces of each of `documents`, the last one first."""
        paths: list[tuple[int, ...]] = []
        for piece in self.documents:
            path = [piece]
            while (piece := self.parents[piece]) >= 0:
                path.append(piece)
            paths.append(tuple(path))
        return tuple(paths)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Return the positions at which each piece begins and ends."""
        return [(start, start + length) for start, length in zip(self.offsets, self.lengths)]

    @property
    def longest(self) -> int:
        """Return the tokens of the longest document."""
        return max(map(sum, zip(self.offsets, self.lengths)), default=0)
