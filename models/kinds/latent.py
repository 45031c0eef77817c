"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): queries, keys and values from low-rank latents."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isoloss.models.kinds.kind import Place, Recorded, SoftmaxAttention
from isoloss.models.kinds.mappings import ColumnParallel, RowParallel
from isoloss.models.kinds.weight import Weight
from isoloss.models.rope import Rope, YarnScaling


@dataclass(frozen=True, kw_only=True)
class Latent(SoftmaxAttention):
    """q_rank: width of the query latent, None where queries are projected directly.
    kv_rank: width of the latent of keys and values.
    nope_dim, rope_dim: widths of the parts of a query and key head without and with rotary positions.
    value_dim: width of a value head.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: Rope

    recomputes = ("mla_up_proj",)

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def rotary_dim(self) -> int:
        return self.rope_dim

    @property
    def rotary_factor(self) -> float:
        return self.rope.cos_sin_factor

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 * self.rope.softmax_factor

    @property
    def cached(self) -> int:
        return self.kv_rank + self.rope_dim

    def weights(self, place: Place) -> Iterator[Weight]:
        mcore, hf, hidden = "self_attention.", "self_attn.", place.hidden
        queries = self.heads * self.head_dim
        if self.q_rank is None:
            yield place.weight(
                f"{mcore}linear_q_proj.weight", f"{hf}q_proj.weight", (queries, hidden), ColumnParallel()
            )
        else:
            yield from self._to_latent(place, "q", "q_a_proj", self.q_rank, self.q_rank)
            yield from self._from_latent(place, "q", self.q_rank, queries)
        yield from self._to_latent(place, "kv", "kv_a_proj_with_mqa", self.kv_rank + self.rope_dim, self.kv_rank)
        yield from self._from_latent(place, "kv", self.kv_rank, self.heads * (self.nope_dim + self.value_dim))
        output = (hidden, self.heads * self.value_dim)
        yield place.weight(f"{mcore}linear_proj.weight", f"{hf}o_proj.weight", output, RowParallel())

    def _to_latent(self, place: Place, name: str, tensor: str, outputs: int, rank: int) -> Iterator[Weight]:
        """The projection to a latent, and its norm."""
        linear, norm = f"self_attention.linear_{name}_down_proj.weight", f"self_attention.{name}_layernorm.weight"
        yield place.weight(linear, f"self_attn.{tensor}.weight", (outputs, place.hidden))
        yield place.weight(norm, f"self_attn.{name}_a_layernorm.weight", (rank,))

    def _from_latent(self, place: Place, name: str, rank: int, outputs: int) -> Iterator[Weight]:
        linear, tensor = f"self_attention.linear_{name}_up_proj.weight", f"self_attn.{name}_b_proj.weight"
        yield place.weight(linear, tensor, (outputs, rank), ColumnParallel())

    def linears(self) -> Sequence[str]:
        queries = ("q_proj",) if self.q_rank is None else ("q_down_proj", "q_up_proj")
        names = (*queries, "kv_down_proj", "kv_up_proj", "proj")
        return tuple(f"self_attention.linear_{name}" for name in names)

    def fused_norms(self) -> Mapping[str, str]:
        latents = ("kv",) if self.q_rank is None else ("q", "kv")
        return {
            f"self_attention.{name}_layernorm.": f"self_attention.linear_{name}_up_proj.layer_norm_" for name in latents
        }

    def fused_kernel_refusals(self, family: str) -> Iterator[str]:
        yield "does not attend for latent attention here"
        yield from super().fused_kernel_refusals(family)

    def recorded(self) -> Iterator[Recorded]:
        scaling = self.rope.scaling
        yield "num_attention_heads", "num_attention_heads", self.heads
        yield "rotary_base", "rope_theta", self.rope.theta
        yield "add_bias_linear", "mlp_bias", False
        yield "add_qkv_bias", "attention_bias", False
        yield "softmax_type", "softmax_type", "vanilla"
        yield "multi_latent_attention", "multi_latent_attention", True
        yield "q_lora_rank", "q_lora_rank", self.q_rank or 0
        yield "kv_lora_rank", "kv_lora_rank", self.kv_rank
        yield "qk_head_dim", "qk_nope_head_dim", self.nope_dim
        yield "qk_pos_emb_head_dim", "qk_rope_head_dim", self.rope_dim
        yield "v_head_dim", "v_head_dim", self.value_dim
        if isinstance(scaling, YarnScaling):
            yield "rope_type", "rope_type", "yarn"
        yield (
            "rotary_scaling_factor",
            "rope_scaling.factor",
            scaling.factor if isinstance(scaling, YarnScaling) else 1.0,
        )

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"multi_latent_attention": True}  # read by Megatron's checks only
