"""What one call of FlashAttention is told of a packed row, uploaded once for all layers."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from isoloss.parallel.ops.mask_blocks import Block, size_of
from isoloss.parallel.runtime.upload import upload


@dataclass(frozen=True)
class Segments:
    """Pieces of a rank's tokens.

    tokens: which take part, int64; None: all, in order.
    starts: where each piece begins among them, int32, and their number at the end.
    longest: tokens of the longest piece.
    """

    tokens: Tensor | None
    starts: Tensor
    longest: int

    @classmethod
    def of(cls, pieces: Sequence[slice], total: int, device: torch.device) -> "Segments":
        """total: tokens of the rank."""
        sizes = [size_of(piece) for piece in pieces]
        starts = torch.tensor([0, *accumulate(sizes)])
        ends = [0, *(piece.stop for piece in pieces)]
        if all(piece.start == end for piece, end in zip(pieces, ends)) and ends[-1] == total:
            return cls(None, upload(starts, device).to(torch.int32), max(sizes))
        tokens = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])
        tokens, starts = upload(torch.cat([tokens, starts]), device).split([len(tokens), len(starts)])
        return cls(tokens, starts.to(torch.int32), max(sizes))

    def take(self, whole: Tensor) -> Tensor:
        return whole if self.tokens is None else whole[self.tokens]


@dataclass(frozen=True)
class VarlenCall:
    """Blocks of one shape of mask, one segment each. left, right: see `Block`; -1: no limit, as the kernel has it."""

    queries: Segments
    keys: Segments
    left: int
    right: int

    @property
    def causal(self) -> bool:
        return self.left < 0 and self.right == 0


class VarlenCache:
    """What the kernel of the GPU was told of a packed row's blocks. The layers of a model, their backward and what is
    computed again ask for the same; it lives as long as the row."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[tuple[Block, ...], list[VarlenCall]]] = {}  # by the identity of the blocks
        self._ragged: dict[tuple, Segments] = {}
        self._once: dict[Hashable, Tensor] = {}

    def calls(self, blocks: tuple[Block, ...], queries: int, keys: int, device: torch.device) -> list[VarlenCall]:
        """The calls that cover these blocks, whose queries differ within each. queries, keys: tokens of both ranks."""
        if id(blocks) not in self._calls:
            by_call: dict[tuple[int, int, int, int], list[Block]] = defaultdict(list)
            seen: Counter[tuple[int, int, int, int]] = Counter()
            for block in blocks:
                left, right = (-1 if limit is None else limit for limit in (block.left, block.right))
                chunk = left, right, block.level, block.queries.start
                turn = seen[chunk]  # a chunk may see two of an owner's under one mask
                seen[chunk] += 1
                by_call[left, right, block.level, turn].append(block)
            made = [
                VarlenCall(
                    self._pieces([block.queries for block in of_call], queries, device),
                    self._pieces([block.keys for block in of_call], keys, device),
                    left,
                    right,
                )
                for (left, right, *_), of_call in by_call.items()
            ]
            self._calls[id(blocks)] = blocks, made
        return self._calls[id(blocks)][1]

    def once(self, key: Hashable, host: Callable[[], Tensor], device: torch.device) -> Tensor:
        """What `host` gives, on the device; asked for again under the same key, the same."""
        if device.type == "cpu":
            return host()
        if key not in self._once:
            self._once[key] = upload(host(), device)
        return self._once[key]

    def _pieces(self, pieces: Sequence[slice], total: int, device: torch.device) -> Segments:
        key = (total, *((piece.start, piece.stop) for piece in pieces))
        if key not in self._ragged:
            self._ragged[key] = Segments.of(pieces, total, device)
        return self._ragged[key]
