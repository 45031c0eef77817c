"""Grouped-query attention (arXiv:2305.13245), also with a gate on its output (Qwen3-Next, arXiv:2505.06708)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from isoloss.models.kinds.kind import Place, Recorded, Refusal, SoftmaxAttention, divisors
from isoloss.models.kinds.mappings import QKV, ColumnParallel, GatedQKV, Replicated, RowParallel
from isoloss.models.kinds.weight import Weight
from isoloss.models.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from isoloss.parallel import Layout


@dataclass(frozen=True, kw_only=True)
class Grouped(SoftmaxAttention):
    """Heads of queries, several of which share a head of keys and of values.

    heads * head_dim need not equal the hidden size.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    rotary_dim: int
    window: int | None = None
    sinks: str = ""
    qk_norm: Literal["", "head", "joint"] = ""
    qkv_bias: bool = False
    output_bias: bool = False

    @property
    def projection(self) -> QKV:
        return QKV(self.heads, self.kv_heads, self.head_dim, self.value_dim)

    @property
    def projected(self) -> tuple[int, int, int]:
        """Channels that queries, keys and values are projected to."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.value_dim

    def weights(self, place: Place) -> Iterator[Weight]:
        mcore, hf, hidden = "self_attention.", "self_attn.", place.hidden
        sizes = self.projected
        for kind, rest in (("weight", (hidden,)), ("bias", ()))[: 1 + self.qkv_bias]:
            parts = {f"{hf}{name}_proj.{kind}": (size, *rest) for name, size in zip("qkv", sizes) if size}
            yield place.joined(f"{mcore}linear_qkv.{kind}", (sum(sizes), *rest), parts, self.projection)
        if self.qk_norm:
            for name, size in zip("qk", sizes):
                joint = self.qk_norm == "joint"
                shape, mapping = ((size,), ColumnParallel()) if joint else ((self.head_dim,), Replicated())
                yield place.weight(f"{mcore}{name}_layernorm.weight", f"{hf}{name}_norm.weight", shape, mapping)
        if self.sinks:
            shape = (self.heads,)
            yield place.weight(f"{mcore}core_attention.softmax_offset", hf + self.sinks, shape, ColumnParallel())
        shape = (hidden, self.heads * self.value_dim)
        yield place.weight(f"{mcore}linear_proj.weight", f"{hf}o_proj.weight", shape, RowParallel())
        if self.output_bias:
            yield place.weight(f"{mcore}linear_proj.bias", f"{hf}o_proj.bias", (hidden,))

    def linears(self) -> Sequence[str]:
        return "self_attention.linear_qkv", "self_attention.linear_proj"

    def fused_norms(self) -> Mapping[str, str]:
        return {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}

    def refusals(self, layout: Layout) -> Iterator[Refusal]:
        yield from super().refusals(layout)
        if self.qk_norm == "joint" and self.kv_heads % layout.tp:
            why = f"does not divide the model's {self.kv_heads} key/value heads, which are normed together"
            yield "parallel.tp", why, divisors(self.kv_heads)

    def recorded(self) -> Iterator[Recorded]:
        scaling = self.rope.scaling
        yield "num_attention_heads", "num_attention_heads", self.heads
        yield "rotary_base", "rope_theta", self.rope.theta
        yield "add_bias_linear", "mlp_bias", self.output_bias
        if not self.output_bias:
            yield "add_qkv_bias", "attention_bias", self.qkv_bias
        yield "softmax_type", "softmax_type", "learnable" if self.sinks else "vanilla"
        yield "multi_latent_attention", "multi_latent_attention", False
        yield "qk_layernorm", "use_qk_norm", self.qk_norm == "head"
        yield "rotary_percent", "partial_rotary_factor", self.rotary_dim / self.head_dim
        yield "attention_output_gate", "attn_output_gate", False
        yield "rotary_interleaved", "rope_interleave", self.rope.interleaved
        yield "position_embedding_type", "rope_type", "yarn" if isinstance(scaling, YarnScaling) else "rope"
        yield "rope_scaling", "rope_type=llama3", isinstance(scaling, Llama3Scaling)
        linear = scaling.factor if isinstance(scaling, LinearScaling) else 1.0
        yield "seq_len_interpolation_factor", "rope_scaling.factor", linear
        if isinstance(scaling, Llama3Scaling):
            yield "rope_scaling_factor", "rope_scaling.factor", scaling.factor
        if isinstance(scaling, YarnScaling):
            yield "yarn_rotary_scaling_factor", "rope_scaling.factor", scaling.factor

    def settings(self) -> dict[str, Any]:
        # `qk_layernorm` lets Megatron sum gradients of norms of that name over TP, which a joint norm has parts of.
        return super().settings() | {
            "add_bias_linear": self.output_bias, "add_qkv_bias": self.qkv_bias, "qk_layernorm": self.qk_norm == "head",
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GroupedQuery(Grouped):
    """Values are as wide as keys.

    qk_norm: RMSNorm of queries and of keys, before the rotation: over each head, or over the channels of all together.
    qkv_bias: projections to queries, keys and values have a bias.
    output_bias: the output projection has one.
    """

    @property
    def value_dim(self) -> int:
        return self.head_dim

    def recorded(self) -> Iterator[Recorded]:
        yield from super().recorded()
        yield "num_query_groups", "num_key_value_heads", self.kv_heads
        yield "kv_channels", "head_dim", self.head_dim


@dataclass(frozen=True, kw_only=True)
class GatedQuery(GroupedQuery):
    """The output is multiplied by a sigmoid, channel by channel, of a gate that is projected with the queries."""

    @property
    def projection(self) -> QKV:
        return GatedQKV(self.heads, self.kv_heads, self.head_dim, self.value_dim)

    @property
    def projected(self) -> tuple[int, int, int]:
        queries, keys, values = super().projected
        return 2 * queries, keys, values

    def recorded(self) -> Iterator[Recorded]:
        gate = "attention_output_gate"
        yield from ((name, label, name == gate or value) for name, label, value in super().recorded())

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"attention_output_gate": True}
