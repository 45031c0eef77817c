"""Gated DeltaNet (arXiv:2412.06464), a linear attention."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isoloss.models.kinds.kind import Attention, Place, Recorded, Refusal, divisors
from isoloss.models.kinds.mappings import ColumnParallel, RowParallel, Sections, WovenSections
from isoloss.models.kinds.weight import Weight
from isoloss.parallel import Layout
from isoloss.parallel.ops.gated_delta import CHUNK

# Megatron-Core's names of what Gated DeltaNet projects of a token, in their order; the first three go through the
# convolution.
DELTA_SECTIONS = ("query", "key", "value", "z", "beta", "alpha")


@dataclass(frozen=True, kw_only=True)
class GatedDelta(Attention):
    """key_heads, value_heads: value head h reads key head h // (value_heads / key_heads).
    key_dim, value_dim: widths of a query or key head, and of a value head.
    conv_width: tokens that the causal convolution of queries, keys and values sees, its own included.
    woven: files hold the projections of a token in two tensors, key head by key head (Qwen3-Next).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    woven: bool = False

    @property
    def channels(self) -> int:
        """Channels of queries, keys and values together: what the convolution sees."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def token_flops(self) -> float:
        """FLOPs of the convolution and the rule: in a chunk of C tokens its products of queries and keys, the system
        that it solves and its outputs, 2 * C * (D + U) each half of a square, and three products with a state of D x U
        (arXiv:2412.06464, section 3.3)."""
        in_chunk = 2 * CHUNK * (self.key_dim + self.value_dim)
        rule = self.value_heads * (in_chunk + 6 * self.key_dim * self.value_dim)
        return rule + 2 * self.conv_width * self.channels

    def weights(self, place: Place) -> Iterator[Weight]:
        """Megatron-Core's in_proj holds all projections of a token; Hugging Face files hold them in several tensors."""
        mcore, hf, hidden, heads = "self_attention.", "linear_attn.", place.hidden, self.value_heads
        keys, values = self.key_heads * self.key_dim, heads * self.value_dim
        sizes, names = (keys, keys, values), DELTA_SECTIONS[:3]
        all_sizes, all_names = (*sizes, values, heads, heads), DELTA_SECTIONS
        if self.woven:
            rows = {"in_proj_qkvz": sum(sizes) + values, "in_proj_ba": 2 * heads}
            mapping = WovenSections(all_sizes, all_names, (4, 2), self.key_heads)
        else:
            rows = {"in_proj_qkv": sum(sizes), "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
            mapping = Sections(all_sizes, all_names, tuple(rows.values()))
        parts = {f"{hf}{name}.weight": (count, hidden) for name, count in rows.items()}
        yield place.joined(f"{mcore}in_proj.weight", (sum(all_sizes), hidden), parts, mapping)
        conv = (sum(sizes), 1, self.conv_width)
        yield place.weight(f"{mcore}conv1d.weight", f"{hf}conv1d.weight", conv, Sections(sizes, names))
        for name in ("dt_bias", "A_log"):
            yield place.weight(f"{mcore}{name}", f"{hf}{name}", (heads,), ColumnParallel())
        yield place.weight(f"{mcore}out_norm.weight", f"{hf}norm.weight", (self.value_dim,))
        yield place.weight(f"{mcore}out_proj.weight", f"{hf}out_proj.weight", (hidden, values), RowParallel())

    def linears(self) -> Sequence[str]:
        return "self_attention.in_proj", "self_attention.out_proj"

    def fused_norms(self) -> Mapping[str, str]:
        return {"input_layernorm.": "self_attention.in_proj.layer_norm_"}

    def refusals(self, layout: Layout) -> Iterator[Refusal]:
        if self.key_heads % layout.tp:
            why = f"does not divide the {self.key_heads} key heads of the model's Gated DeltaNet"
            yield "parallel.tp", why, divisors(self.key_heads)
        rank_heads = self.value_heads // layout.tp
        if rank_heads % layout.context:
            key, other = ("ring", "ulysses") if layout.ring > 1 else ("ulysses", "ring")
            why = (
                f"x {other}={getattr(layout, other)} does not divide the {rank_heads} value heads of a TP rank in the "
                "model's Gated DeltaNet"
            )
            yield f"parallel.{key}", why, f"for parallel.ulysses x parallel.ring {divisors(rank_heads)}"

    def recorded(self) -> Iterator[Recorded]:
        yield "linear_conv_kernel_dim", "linear_conv_kernel_dim", self.conv_width
        yield "linear_key_head_dim", "linear_key_head_dim", self.key_dim
        yield "linear_value_head_dim", "linear_value_head_dim", self.value_dim
        yield "linear_num_key_heads", "linear_num_key_heads", self.key_heads
        yield "linear_num_value_heads", "linear_num_value_heads", self.value_heads

    def settings(self) -> dict[str, Any]:
        """Return the numbers of heads that Megatron-Core requires even where no layer has softmax attention."""
        return {
            "num_attention_heads": self.value_heads, "num_query_groups": self.key_heads, "kv_channels": self.key_dim,
        }  # fmt: skip
