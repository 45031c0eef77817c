"""Architectures that no config.json describes: a plain decoder, and the same with other layers."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

from isoloss.models.architecture import Architecture
from isoloss.models.kinds.dense import Dense
from isoloss.models.kinds.experts import Experts
from isoloss.models.kinds.grouped_query import GroupedQuery
from isoloss.models.kinds.kind import MLP, Attention
from isoloss.models.kinds.layer import Layer
from isoloss.models.rope import Rope


def decoder(
    layers: int, hidden: int, heads: tuple[int, int, int], width: int, vocab: int, theta: float = 1e4, **known: Any
) -> Architecture:
    """Llama with these layers. heads: query heads, key/value heads, their width."""
    queries, kv_heads, head_dim = heads
    attention = GroupedQuery(heads=queries, kv_heads=kv_heads, head_dim=head_dim, rope=Rope(theta), rotary_dim=head_dim)
    plain = {"norm_eps": 1e-6, "tie_embeddings": False, "max_positions": 64, "dtype": "float32"}
    layer = Layer(attention, Dense(width))
    return Architecture("llama", (layer,) * layers, hidden_size=hidden, vocab_size=vocab, **{**plain, **known})


def with_attentions(arch: Architecture, attentions: Sequence[Attention]) -> Architecture:
    """Its layers have these in turn."""
    layers = zip(arch.layers, cycle(attentions))
    return replace(arch, layers=tuple(replace(layer, attention=attention) for layer, attention in layers))


def attending(arch: Architecture, **changes: Any) -> Architecture:
    """The attention of every layer is changed."""
    return arch.with_layers(lambda layer: replace(layer, attention=replace(layer.attention, **changes)))


def with_windows(arch: Architecture, *windows: int | None) -> Architecture:
    """Its layers have these windows in turn."""
    return with_attentions(arch, [replace(arch.layers[0].attention, window=window) for window in windows])


def with_mlp(arch: Architecture, mlp: MLP, dense_layers: int = 0) -> Architecture:
    """Its layers but the first ones have this MLP."""
    layers = enumerate(arch.layers)
    return replace(arch, layers=tuple(replace(x, mlp=mlp) if n >= dense_layers else x for n, x in layers))


def sparse(arch: Architecture, *args: Any, dense_layers: int = 0, **known: Any) -> Architecture:
    """Its layers but the first ones have experts, of these fields."""
    return with_mlp(arch, Experts(*args, **known), dense_layers)
