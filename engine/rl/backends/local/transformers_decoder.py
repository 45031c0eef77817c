"""Rows that a transformers model decodes together.

They differ in length, so they are padded on the left: the newest token is in the last column of every row. The padding
is masked out and positions are counted without it, so what a row computes does not depend on its neighbours, beyond
rounding.

Shape suffixes: B rows of the batch, T its columns (tokens of the longest row), V the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from isoloss.engine.rl.backends.local.continuous_batching import ActiveSequence, Decoder
from isoloss.parallel.loss_head import softcapped, unrounded_logits


@dataclass
class Batch:
    """Rows that decode together, and their keys and values: the last row.length - 1 columns of a row of the cache are
    its own (all but those of its newest token, which no forward has read), the columns before them padding. A layer of
    linear attention has a state of each row in their place, which padding leaves as it is."""

    rows: list[ActiveSequence]
    cache: DynamicCache

    def select(self, keep: Sequence[int]) -> "Batch":
        """Return these rows, without columns that none of them needs."""
        rows = [self.rows[k] for k in keep]
        _take_rows(self.cache, keep)
        columns = max(row.length for row in rows) - 1
        for layer in _attention(self.cache):
            layer.keys, layer.values = (x[:, :, x.shape[2] - columns :] for x in (layer.keys, layer.values))
        return Batch(rows, self.cache)

    def join(self, other: "Batch") -> "Batch":
        """The rows of both."""
        columns = max(_columns(self.cache), _columns(other.cache))
        for mine, theirs in zip(_attention(self.cache), _attention(other.cache), strict=True):
            mine.keys = torch.cat([_widened(mine.keys, columns), _widened(theirs.keys, columns)])
            mine.values = torch.cat([_widened(mine.values, columns), _widened(theirs.values, columns)])
        for mine, theirs in zip(_states(self.cache), _states(other.cache), strict=True):
            mine[0] = torch.cat([mine[0], theirs[0]])
        return Batch(self.rows + other.rows, self.cache)


class TransformersDecoder(Decoder):
    """Decodes with a transformers model."""

    def __init__(self, model: PreTrainedModel):
        self._model = model

    def prefill(self, rows: Sequence[ActiveSequence]) -> tuple[Batch, Tensor]:
        """Read prompts (and what partial completions have); the logits of each row's next token, [B, V].

        Rows with the same tokens, such as the completions of one prompt, are read once.
        """
        place: dict[tuple[int, ...], int] = {}
        source = [place.setdefault(row.context, len(place)) for row in rows]
        columns = max(map(len, place))
        tokens_BT = torch.tensor([[0] * (columns - len(context)) + list(context) for context in place])
        lengths_B = torch.tensor([len(context) for context in place])
        cache = _empty_cache(self._model)
        logits_BV = _forward(self._model, tokens_BT, lengths_B, cache)
        if len(place) < len(rows):
            _take_rows(cache, source)
            logits_BV = logits_BV[source]
        return Batch(list(rows), cache), logits_BV

    def decode(self, batch: Batch) -> Tensor:
        """Read the newest token of every row; the logits of the next one, [B, V]."""
        tokens_B1 = torch.tensor([row.tokens[-1:] for row in batch.rows])
        return _forward(self._model, tokens_B1, torch.tensor([row.length for row in batch.rows]), batch.cache)


def _forward(model: PreTrainedModel, tokens_BT: Tensor, lengths_B: Tensor, cache: DynamicCache) -> Tensor:
    """Return logits of the next tokens, by the trainer's head, so that rounding is the same in both. lengths_B: lengths
    of the rows with these tokens."""
    columns = _columns(cache) + tokens_BT.shape[1]
    positions_BT = torch.arange(columns) - (columns - lengths_B)[:, None]
    output: Any = model.base_model(
        input_ids=tokens_BT.to(model.device),
        attention_mask=(positions_BT >= 0).to(model.device),
        position_ids=positions_BT[:, -tokens_BT.shape[1] :].clamp(min=0).to(model.device),
        past_key_values=cache,
        use_cache=True,
    )
    head: Any = model.get_output_embeddings()
    logits_BV = unrounded_logits(output.last_hidden_state[:, -1], head.weight)
    return softcapped(logits_BV, getattr(model.config, "final_logit_softcapping", None))


def _empty_cache(model: PreTrainedModel) -> DynamicCache:
    """Return a cache, without the configuration if possible: sliding layers then keep everything, and only mask it."""
    kinds = getattr(model.config, "layer_types", None) or ()
    return DynamicCache(config=model.config) if "linear_attention" in kinds else DynamicCache()


def _attention(cache: DynamicCache) -> list[Any]:
    """Return the layers with keys and values, [B, heads, T, D]."""
    return [layer for layer in cache.layers if not isinstance(layer, LinearAttentionLayer)]


def _states(cache: DynamicCache) -> list[Any]:
    """Return the states of layers of linear attention, each under 0 of a mapping: the last inputs of the convolution,
    and the state; rows first."""
    linear = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
    return [kept for layer in linear for kept in (layer.conv_states, layer.recurrent_states)]


def _columns(cache: DynamicCache) -> int:
    layers = _attention(cache)
    return layers[0].get_seq_length() if layers else 0


def _take_rows(cache: DynamicCache, rows: Sequence[int]) -> None:
    for layer in _attention(cache):
        indices = torch.tensor(rows, device=layer.keys.device)
        layer.keys, layer.values = layer.keys.index_select(0, indices), layer.values.index_select(0, indices)
    for kept in _states(cache):
        kept[0] = kept[0].index_select(0, torch.tensor(rows, device=kept[0].device))


def _widened(x: Tensor, columns: int) -> Tensor:
    """With padding on the left to this many columns."""
    return pad(x, (0, 0, columns - x.shape[2], 0))
