"""Rows that the trainer's own model decodes together: no second copy of the weights, no transfer of them, and the
kernels of training, so that what generates and what trains differ by rounding alone.

Rows stand one behind the other, one token each, as documents do in training: nothing is padded. Shape suffixes: B rows,
V the vocabulary, R tokens of the packed row.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from isoloss.engine.rl.backends.generation import ActiveSequence
from isoloss.models.mcore.gpt import forward_row
from isoloss.models.mcore.packed_products import PackedProducts
from isoloss.models.model import Model
from isoloss.parallel.decoding import KeyValueCache
from isoloss.parallel.upload import upload


@dataclass
class CachedRows:
    """Rows that decode together, and the keys and values of all their tokens but the newest."""

    rows: list[ActiveSequence]
    cache: KeyValueCache

    def select(self, keep: Sequence[int]) -> "CachedRows":
        self.cache.select(keep)
        return CachedRows([self.rows[k] for k in keep], self.cache)

    def join(self, other: "CachedRows") -> "CachedRows":
        self.cache.join(other.cache)
        return CachedRows([*self.rows, *other.rows], self.cache)


class MegatronDecoder:
    """A `Decoder` by the model's weights as they are when it first decodes.

    Collective over tp, whose ranks pass the same rows.
    """

    def __init__(self, model: Model):
        self._model = model
        layout = model.mesh.layout
        self._multiple = layout.tp if layout.sequence_parallel else 1
        self._products: PackedProducts | None = None

    def prefill(self, rows: Sequence[ActiveSequence]) -> tuple[CachedRows, Tensor]:
        """See `Decoder`."""
        place: dict[tuple[int, ...], int] = {}
        source = [place.setdefault(row.context, len(place)) for row in rows]
        lengths = [len(context) for context in place]
        cache = KeyValueCache(lengths, self._model.device)
        tokens = [token for context in place for token in context]
        positions = [position for length in lengths for position in range(length)]
        ends = torch.tensor(lengths).cumsum(0) - 1
        logits_BV = self._forward(tokens, positions, lengths, ends, cache)
        cache.begin(source)
        return CachedRows(list(rows), cache), logits_BV[torch.tensor(source, device=logits_BV.device)]

    def decode(self, batch: CachedRows) -> Tensor:
        """See `Decoder`."""
        tokens, positions = [row.tokens[-1] for row in batch.rows], [row.length - 1 for row in batch.rows]
        count = len(tokens)
        (module,) = self._model.modules
        if self._products is None and PackedProducts.serve(module):
            self._products = PackedProducts(module, count)
        with self._products.in_layers() if self._products else nullcontext():
            logits_BV = self._forward(tokens, positions, [1] * count, torch.arange(count), batch.cache)
        batch.cache.grown()
        return logits_BV

    def _forward(
        self, tokens: list[int], positions: list[int], lengths: list[int], at: Tensor, cache: KeyValueCache
    ) -> Tensor:
        """The logits at these places of a row of documents of these lengths."""
        (chunk,), device = self._model.chunks, self._model.device
        rest = -len(tokens) % self._multiple
        both = upload(torch.tensor([tokens + [0] * rest, positions + list(range(rest))]), device)
        lengths = lengths + [rest] * (rest > 0)
        hidden = forward_row(chunk, both[0], both[1], tuple(lengths), cache=cache)
        return self._model.logits(hidden, upload(at, device), self._products.head if self._products else None)
