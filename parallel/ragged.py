"""Pieces of a packed row as index tensors on the device, uploaded once for all layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from isoloss.parallel.upload import upload


@dataclass(frozen=True)
class Ragged:
    """Pieces as the kernel of the GPU takes them: the tokens that take part, where each document's begin among them,
    int32, and how many the longest has."""

    tokens: Tensor
    starts: Tensor
    longest: int

    @classmethod
    def of(cls, pieces: Sequence[slice], device: torch.device) -> "Ragged":
        sizes = [piece.stop - piece.start for piece in pieces]
        tokens = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])
        tokens, starts = upload(torch.cat([tokens, torch.tensor([0, *accumulate(sizes)])]), device).split(
            [len(tokens), len(sizes) + 1]
        )
        return cls(tokens, starts.to(torch.int32), max(sizes))


class Uploads:
    """What the kernel of the GPU was told of a packed row's blocks. The layers of a model, their backward and what is
    computed again ask for the same; it lives as long as the row."""

    def __init__(self) -> None:
        self._made: dict[tuple, Ragged] = {}

    def ragged(self, pieces: Sequence[slice], device: torch.device) -> Ragged:
        key = (device, *((piece.start, piece.stop) for piece in pieces))
        if key not in self._made:
            self._made[key] = Ragged.of(pieces, device)
        return self._made[key]
