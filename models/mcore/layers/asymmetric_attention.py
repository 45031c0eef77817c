"""Grouped-query attention whose values are not as wide as its keys (MiMo-V2-Flash), or are the keys (Gemma 4), or whose
layers differ in key/value heads and rotation, in Megatron's attention slot.

Parameters and their names are those of Megatron's SelfAttention, which has one width of a head, and one number of
key/value heads and one rotation of all layers. Here every TP rank has key/value heads of its own.

Letters: R tokens of this rank's slice of a packed row, H query heads and K key/value heads of this TP rank.
"""

from collections.abc import Callable
from functools import partial

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from isoloss.models.architecture import Architecture
from isoloss.models.mcore.layer_config import LayerConfig
from isoloss.models.mcore.layers.norm import RMSNorm, unit_norm
from isoloss.models.mcore.layers.rotary import rotate
from isoloss.parallel.attention import PackedAttention


class DifferingAttention(MegatronModule):
    """core: makes the core attention from (config, layer_number). Of what Megatron recomputes selectively it knows
    `core_attn`."""

    def __init__(
        self,
        config: LayerConfig,
        *,
        layer_number: int,
        arch: Architecture,
        core: Callable[[TransformerConfig, int], PackedAttention],
        pg_collection,
        **unused,
    ):
        super().__init__(config)
        del unused
        tp, layer, kv_heads = pg_collection.tp, layer_number - 1, arch.kv_heads(layer_number - 1)
        self.kv_heads, self.head_dim, value_dim = kv_heads // tp.size(), arch.key_dim(layer), arch.value_dim(layer)
        self.projected_dim = value_dim if arch.projects_values(layer) else 0
        self.value_scale = arch.values.scale if arch.values else None
        self.value_norm_eps = arch.norm_eps if arch.value_norm else None
        self.pairs = [channels // 2 for channels in arch.rotary_dims]
        self.one_kernel = config.kernels.rope
        self.own_rope = len(self.pairs) - 1 if arch.window(layer) else 0
        self.recomputes_core = "core_attn" in config.recomputed
        options = {"config": config, "init_method": nn.Identity(), "bias": False, "tp_group": tp}
        rows = (arch.num_heads + kv_heads) * self.head_dim + kv_heads * self.projected_dim
        self.linear_qkv = ColumnParallelLinear(arch.hidden_size, rows, gather_output=False, **options)
        if arch.qk_norm:
            self.q_layernorm = RMSNorm(config, self.head_dim, arch.norm_eps)
            self.k_layernorm = RMSNorm(config, self.head_dim, arch.norm_eps)
        self.qk_norm = arch.qk_norm
        self.core_attention = core(config, layer_number)
        self.linear_proj = RowParallelLinear(
            arch.num_heads * value_dim, arch.hidden_size, input_is_parallel=True, skip_bias_add=True, **options
        )

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
        groups = self.linear_qkv(hidden)[0].unflatten(-1, (self.kv_heads, -1))
        queries = groups.shape[-1] - self.head_dim - self.projected_dim
        query, key, value = groups.split([queries, self.head_dim, self.projected_dim], -1)
        query = query.unflatten(-1, (-1, self.head_dim)).flatten(2, 3)
        if not self.projected_dim:
            value = key
        if self.qk_norm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        own_table = table.split(self.pairs, -1)[self.own_rope]
        query, key = (rotate(x, own_table, one_kernel=self.one_kernel) for x in (query, key))
        if self.value_norm_eps is not None:
            value = unit_norm(value, self.value_norm_eps)
        return query, key, value if self.value_scale is None else value * self.value_scale
