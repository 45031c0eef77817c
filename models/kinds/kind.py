"""The interface of every kind of attention and MLP."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from isoloss.models.kinds.mappings import ParamMapping, Replicated
from isoloss.models.kinds.weight import Part, Shape, Weight
from isoloss.models.rope import Rope
from isoloss.parallel import Layout

# A key, why its value cannot be, and what would do.
Refusal = tuple[str, str, str]
# A field of a recorded configuration, by Megatron-Core's name; what config.json calls it; its value.
Recorded = tuple[str, str, Any]
# SwiGLU; that of gpt-oss, which is clamped; GELU (by tanh) of the gate.
Activation = Literal["swiglu", "clamped_swiglu", "geglu"]
# What Megatron-Core records of each.
RECORDED_ACTIVATION: Mapping[Activation, str] = {
    "swiglu": "silu", "clamped_swiglu": "quick_gelu", "geglu": "fast_gelu",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Names and hidden size of a layer, to make its weights with.

    prefix: prefix of `layers.N.` in Hugging Face files.
    """

    layer: int
    hidden: int
    prefix: str

    def weight(
        self, name: str, tensor: str, shape: Shape, mapping: ParamMapping | None = None, expert: int | None = None
    ) -> Weight:
        """A weight that is one Hugging Face tensor, the same on every rank unless `mapping` says otherwise."""
        return self.joined(name, shape, {tensor: shape}, mapping or Replicated(), expert)

    def joined(
        self, name: str, shape: Shape, tensors: Mapping[str, Shape], mapping: ParamMapping, expert: int | None = None
    ) -> Weight:
        """A weight that is made of several tensors. Both names are those within the layer."""
        parts = tuple(Part(self.tensor(tensor), part) for tensor, part in tensors.items())
        return Weight(f"decoder.layers.{self.layer}.{name}", shape, parts, mapping, self.layer, expert)

    def tensor(self, name: str) -> str:
        return f"{self.prefix}layers.{self.layer}.{name}"


class Kind:
    """A part of a layer. Fields of its dataclass describe it; all else follows from them.

    recomputes: modules of `memory.recompute_modules` that only some models have, and this kind brings.
    """

    recomputes: Sequence[str] = ()

    def weights(self, place: Place) -> Iterator[Weight]:
        raise NotImplementedError

    def linears(self) -> Sequence[str]:
        """Megatron-Core's names of its linear layers, within the layer: what an adapter can target."""
        raise NotImplementedError

    def fused_norms(self) -> Mapping[str, str]:
        """Norms by the beginning of their name: as they are in the local layer spec, and as part of the layer behind
        them, as Transformer Engine's spec and checkpoints have them."""
        return {}

    def refusals(self, layout: Layout) -> Iterator[Refusal]:
        """Why a layout cannot be."""
        raise NotImplementedError

    def recorded(self) -> Iterator[Recorded]:
        """Yield the settings that a trainer records next to a checkpoint."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Fields of Megatron-Core's TransformerConfig."""
        raise NotImplementedError


class Attention(Kind):
    """A kind of attention, which mixes the tokens of a sequence.

    window: how many tokens a token sees, itself included; None: all.
    rope, rotary_dim: the rotation, and the channels of a head that turn; None and 0 without one.
    rotary_factor: multiplies cosine and sine.
    pair_flops: forward FLOPs for n^2 of a sequence of n tokens, matrices not counted.
    token_flops: the same for a token.
    cached: numbers that generation keeps of a token.
    sinks: name in Hugging Face files, below `self_attn.`, of one more, learned logit of each head's softmax that no
        value belongs to; "": there is none.
    """

    sinks: str = ""
    window: int | None = None
    rope: Rope | None = None
    rotary_dim: int = 0
    rotary_factor: float = 1.0
    pair_flops: float = 0.0
    token_flops: float = 0.0
    cached: int = 0

    def flops(self, tokens: int) -> float:
        """Forward FLOPs over a sequence, its matrices not counted. A window leaves the square up to it and a strip
        beyond."""
        seen = min(tokens, self.window or tokens)
        return self.token_flops * tokens + self.pair_flops * seen * (2 * tokens - seen)

    def fused_kernel_refusals(self, family: str) -> Iterator[str]:
        """Why Transformer Engine's fused attention, over packed rows, cannot compute it."""
        yield from ()


class SoftmaxAttention(Attention):
    """Attention whose weights are a softmax over tokens: its heads, and what follows from their widths.

    kv_heads: key/value heads (groups of query heads), a divisor of heads.
    head_dim, value_dim: widths of a query or key head, and of a value head.
    softmax_scale: multiplies the product of a query and a key; None: 1 / sqrt(head_dim).
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rope: Rope
    rotary_dim: int
    softmax_scale: float | None = None

    @property
    def scale(self) -> float:
        """Return the factor of the product of a rotated query and key."""
        # Where cosine and sine of a whole head are scaled, so is the product of a query and a key, twice.
        return (self.softmax_scale or self.head_dim**-0.5) * self.rope.softmax_factor * self.rope.cos_sin_factor**2

    @property
    def pair_flops(self) -> float:
        """q k^T and probabilities x v take 2 * heads * width * n^2 each, of which causality leaves half."""
        return 2 * self.heads * (self.head_dim + self.value_dim) / 2

    @property
    def cached(self) -> int:
        return self.kv_heads * (self.head_dim + self.value_dim)

    def refusals(self, layout: Layout) -> Iterator[Refusal]:
        heads, kv_heads, tp = self.heads, self.kv_heads, layout.tp
        if heads % tp:
            yield "parallel.tp", f"does not divide the model's {heads} attention heads", divisors(heads)
        if kv_heads % tp and tp % kv_heads:
            why = f"neither divides nor is a multiple of the model's {kv_heads} key/value heads"
            yield "parallel.tp", why, divisors(kv_heads)
        rank_heads = heads // tp
        if rank_heads % layout.ulysses:
            why = f"does not divide the {rank_heads} attention heads of a TP rank ({heads} heads / tp {tp})"
            yield "parallel.ulysses", why, f"{divisors(rank_heads)}, and parallel.ring for more context ranks"

    def fused_kernel_refusals(self, family: str) -> Iterator[str]:
        if self.sinks:
            yield "has no attention sinks in packed rows"
        if self.head_dim % 8:
            yield f"needs heads of a multiple of 8 channels, and the model's have {self.head_dim}"

    def settings(self) -> dict[str, Any]:
        return {
            "num_attention_heads": self.heads, "num_query_groups": self.kv_heads, "kv_channels": self.head_dim,
        }  # fmt: skip


class MLP(Kind):
    """A kind of MLP, which computes each token by itself.

    experts: the `Experts` in it, or None.
    activation: activation of the gate.
    """

    experts: Any = None
    activation: Activation

    def norm(self, place: Place, name: str) -> Iterator[Weight]:
        """Return the weights of what norms the residual stream for it. name: what files call a single norm."""
        yield place.weight("pre_mlp_layernorm.weight", f"{name}.weight", (place.hidden,))


def divisors(n: int) -> str:
    return f"use one of {[d for d in range(1, n + 1) if n % d == 0]}"
