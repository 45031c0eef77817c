"""Arguments of FlashAttention's varlen calls for a packed row, uploaded once for all layers."""

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
    """Segments of the tokens of a rank, each the queries or the keys of a block.

    tokens: indices of the tokens of all segments, int64; None: all tokens of the rank, in order.
    starts: offset of each segment in `tokens`, and the number of tokens at the end, int32.
    longest: tokens of the longest segment.
    """

    tokens: Tensor | None
    starts: Tensor
    longest: int

    @classmethod
    def of(cls, pieces: Sequence[slice], total: int, device: torch.device) -> "Segments":
        """Upload the segments of these slices. total: tokens of the rank."""
        sizes = [size_of(piece) for piece in pieces]
        starts = torch.tensor([0, *accumulate(sizes)])
        ends = [0, *(piece.stop for piece in pieces)]
        if all(piece.start == end for piece, end in zip(pieces, ends)) and ends[-1] == total:
            return cls(None, upload(starts, device).to(torch.int32), max(sizes))
        tokens = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])
        tokens, starts = upload(torch.cat([tokens, starts]), device).split([len(tokens), len(starts)])
        return cls(tokens, starts.to(torch.int32), max(sizes))

    def take(self, x: Tensor) -> Tensor:
        """Return the rows of `x`, one for each token of the rank, that are in a segment; no copy if all are."""
        return x if self.tokens is None else x[self.tokens]


@dataclass(frozen=True)
class VarlenCall:
    """A call of the kernel, for blocks with the same limits of the mask.

    queries, keys: a segment for each block.
    left, right: limits of the mask, see `Block`; -1, as in the kernel: no limit.
    """

    queries: Segments
    keys: Segments
    left: int
    right: int

    @property
    def causal(self) -> bool:
        return self.left < 0 and self.right == 0


class VarlenCache:
    """Tensors on the device that describe a packed row.

    All layers of a model, their backward and their recomputation read the same tensors. The cache lives as long as the
    row.
    """

    def __init__(self) -> None:
        self._calls: dict[int, tuple[tuple[Block, ...], list[VarlenCall]]] = {}  # by the identity of the blocks
        self._segments: dict[tuple, Segments] = {}
        self._once: dict[Hashable, Tensor] = {}

    def calls(self, blocks: tuple[Block, ...], queries: int, keys: int, device: torch.device) -> list[VarlenCall]:
        """Return the calls that cover these blocks; within a call no query is in two segments.

        queries: tokens of the rank of the queries. keys: tokens of the owner of the keys.
        """
        if id(blocks) not in self._calls:
            by_call: dict[tuple[int, int, int, int], list[Block]] = defaultdict(list)
            seen: Counter[tuple[int, int, int, int]] = Counter()
            for block in blocks:
                left, right = (-1 if limit is None else limit for limit in (block.left, block.right))
                chunk = left, right, block.level, block.queries.start
                turn = seen[chunk]  # one chunk of queries may see both chunks of an owner with the same limits
                seen[chunk] += 1
                by_call[left, right, block.level, turn].append(block)
            calls = [
                VarlenCall(
                    self._uploaded([block.queries for block in call_blocks], queries, device),
                    self._uploaded([block.keys for block in call_blocks], keys, device),
                    left,
                    right,
                )
                for (left, right, *_), call_blocks in by_call.items()
            ]
            self._calls[id(blocks)] = blocks, calls
        return self._calls[id(blocks)][1]

    def once(self, key: Hashable, host: Callable[[], Tensor], device: torch.device) -> Tensor:
        """Return the tensor that `host` makes, on the device; on a GPU it is made and uploaded once for each key."""
        if device.type == "cpu":
            return host()
        if key not in self._once:
            self._once[key] = upload(host(), device)
        return self._once[key]

    def _uploaded(self, pieces: Sequence[slice], total: int, device: torch.device) -> Segments:
        key = (total, *((piece.start, piece.stop) for piece in pieces))
        if key not in self._segments:
            self._segments[key] = Segments.of(pieces, total, device)
        return self._segments[key]
