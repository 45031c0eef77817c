"""Grouped-query attention whose values are not as wide as its keys (MiMo-V2-Flash), or are the keys (Gemma 4), or whose
layers differ in key/value heads and rotation, in Megatron's attention slot.

Parameters and their names are those of Megatron's SelfAttention, which has one width of a head, and one number of
key/value heads and one rotation of all layers. Here every TP rank has key/value heads of its own.

Letters: R tokens of this rank's slice of a packed row, H query heads and K key/value heads of this TP rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from isoloss.models.kinds.asymmetric import Asymmetric
from isoloss.models.mcore.layer_config import BuildOptions, LayerConfig
from isoloss.models.mcore.layers.core_attention import core_attention, fill_attention
from isoloss.models.mcore.layers.norm import RMSNorm, unit_norm
from isoloss.models.mcore.layers.rotary import rotate
from isoloss.parallel import Mesh
from isoloss.parallel.attention import PackedAttention


class AsymmetricAttention(MegatronModule):
    """core: makes the core attention from (config, layer_number). Of what Megatron recomputes selectively it knows
    `core_attn`."""

    config: LayerConfig

    def __init__(
        self,
        config: LayerConfig,
        *,
        layer_number: int,
        kind: Asymmetric,
        core: Callable[[TransformerConfig, int], PackedAttention],
        pg_collection,
        **unused,
    ):
        super().__init__(config)
        del unused
        tp, hidden = pg_collection.tp, config.hidden_size
        self.kind, self.kv_heads = kind, kind.kv_heads // tp.size()
        self.one_kernel, self.norm_eps = config.kernels.rope, config.layernorm_epsilon
        self.rotation = config.ropes.index((kind.rope, kind.rotary_dim))
        self.recomputes_core = "core_attn" in config.recomputed
        options = {"config": config, "init_method": nn.Identity(), "bias": False, "tp_group": tp}
        self.linear_qkv = ColumnParallelLinear(hidden, sum(kind.projected), gather_output=False, **options)
        if kind.qk_norm:
            self.q_layernorm, self.k_layernorm = (RMSNorm(config, kind.head_dim, self.norm_eps) for _ in range(2))
        self.core_attention = core(config, layer_number)
        self.linear_proj = RowParallelLinear(
            kind.heads * kind.value_dim, hidden, input_is_parallel=True, skip_bias_add=True, **options
        )

    @classmethod
    def fill(cls, layer: Any, kind: Asymmetric, mesh: Mesh, options: BuildOptions) -> None:
        fill_attention(layer, cls, kind, options, core=core_attention(kind, mesh, options))

    def forward(
        self, hidden: Tensor, attention_mask=None, *, rotary_pos_emb: Tensor, packed_seq_params, **unused
    ) -> tuple[Tensor, Tensor | None]:
        """hidden: [R (/tp if sequence-parallel), 1, hidden]; rotary_pos_emb: a `rotary_table` of the pairs of all
        rotations of the model, one after the other."""
        del attention_mask, unused

        def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self.core_attention(query, key, value, None, packed_seq_params=packed_seq_params)

        attend = partial(checkpoint, core, False) if self.recomputes_core else core
        return self.linear_proj(attend(*self._project(hidden, rotary_pos_emb)))

    def _project(self, hidden: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [R, 1, H, head_dim], keys [R, 1, K, head_dim] and values [R, 1, K, value_dim]."""
        kind, head_dim = self.kind, self.kind.head_dim
        groups = self.linear_qkv(hidden)[0].unflatten(-1, (self.kv_heads, -1))
        queries = groups.shape[-1] - head_dim - kind.projected_dim
        query, key, value = groups.split([queries, head_dim, kind.projected_dim], -1)
        query = query.unflatten(-1, (-1, head_dim)).flatten(2, 3)
        if kind.keys_as_values:
            value = key
        if kind.qk_norm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        own_table = table.split([channels // 2 for _, channels in self.config.ropes], -1)[self.rotation]
        query, key = (rotate(x, own_table, one_kernel=self.one_kernel) for x in (query, key))
        if kind.value_norm:
            value = unit_norm(value, self.norm_eps)
        return query, key, value if kind.value_scale is None else value * kind.value_scale
