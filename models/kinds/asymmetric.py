"""Grouped-query attention whose values differ from its keys, or whose heads and rotation differ from layer to layer
(MiMo-V2-Flash, Gemma 4). Megatron-Core's attention has one width of a head and one rotation."""

from collections.abc import Iterator
from dataclasses import dataclass

from isoloss.models.kinds.grouped_query import Grouped
from isoloss.models.kinds.kind import Refusal, divisors
from isoloss.models.kinds.mappings import QKV
from isoloss.parallel import Layout


@dataclass(frozen=True, kw_only=True)
class Asymmetric(Grouped):
    """value_dim: width of a value head.
    value_scale: multiplies values; None: nothing does.
    value_norm: RMSNorm over each value head, without a weight.
    keys_as_values: no values are projected: they are the keys before norm and rotation.
    """

    value_dim: int
    value_scale: float | None = None
    value_norm: bool = False
    keys_as_values: bool = False
    softmax_scale: float | None = None

    @property
    def projected_dim(self) -> int:
        """Width of a value head in the projection."""
        return 0 if self.keys_as_values else self.value_dim

    @property
    def projection(self) -> QKV:
        return QKV(self.heads, self.kv_heads, self.head_dim, self.projected_dim)

    @property
    def projected(self) -> tuple[int, int, int]:
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.projected_dim

    def refusals(self, layout: Layout) -> Iterator[Refusal]:
        yield from super().refusals(layout)
        if self.kv_heads % layout.tp:
            why = f"does not divide the {self.kv_heads} key/value heads of some of the model's layers"
            yield "parallel.tp", why, divisors(self.kv_heads)

    def fused_kernel_refusals(self, family: str) -> Iterator[str]:
        yield f"does not attend for {family} attention here"
        yield from super().fused_kernel_refusals(family)
