"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), in Megatron's attention slot.

Parameters and their names are those of Megatron's MLASelfAttention. That one computes rotary angles from the place in
the row, which a packed and sharded row needs by position id, and shards the projections down to the latents over TP
only to gather them again; here every TP rank holds them whole.

Letters: R tokens of this rank's slice of a packed row, H query heads of this TP rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput, checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import linear

from isoloss.models.kinds.latent import Latent
from isoloss.models.mcore.layer_config import BuildOptions, LayerConfig
from isoloss.models.mcore.layers.core_attention import core_attention, fill_attention
from isoloss.models.mcore.layers.norm import RMSNorm
from isoloss.models.mcore.layers.rotary import rotate_interleaved
from isoloss.parallel import Mesh
from isoloss.parallel.attention import PackedAttention
from isoloss.parallel.collectives import gather_rows

# transformers builds the norms of the latents with its default, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


class ReplicatedLinear(MegatronModule):
    """A linear layer without bias that every TP rank holds whole; under sequence parallelism it sees this rank's tokens
    only, and Megatron's finalize step sums its gradient over TP.

    adapter: adapters, of which the active one is multiplied by as well (`lora.Slot`).
    """

    adapter: Any = None

    def __init__(self, config: TransformerConfig, input_size: int, output_size: int):
        super().__init__(config)
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        adapter = self.adapter and self.adapter.active
        return linear(x, self.weight) if adapter is None else adapter.multiply(x, self.weight)


class LatentAttention(MegatronModule):
    """core: makes the core attention from (config, layer_number). Of what Megatron recomputes selectively it knows
    `core_attn` and `mla_up_proj` (queries, keys and values, made again from the latents)."""

    def __init__(
        self,
        config: LayerConfig,
        *,
        layer_number: int,
        kind: Latent,
        core: Callable[[TransformerConfig, int], PackedAttention],
        pg_collection,
        **unused,
    ):
        super().__init__(config)
        del unused
        self.latent, self.tp = kind, pg_collection.tp
        self._rotated = partial(rotate_interleaved, one_kernel=config.kernels.rope)
        self.heads = kind.heads // self.tp.size()
        self.recomputed = config.recomputed
        latent, hidden = kind, config.hidden_size

        def column(inputs: int, outputs: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                inputs, outputs, config=config, init_method=nn.Identity(), bias=False, gather_output=False,
                tp_group=self.tp,
            )  # fmt: skip

        queries = latent.heads * latent.head_dim
        if latent.q_rank is None:
            self.linear_q_proj = column(hidden, queries)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, latent.q_rank)
            self.q_layernorm = RMSNorm(config, latent.q_rank, LATENT_NORM_EPS)
            self.linear_q_up_proj = column(latent.q_rank, queries)
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, latent.kv_rank + latent.rope_dim)
        self.kv_layernorm = RMSNorm(config, latent.kv_rank, LATENT_NORM_EPS)
        self.linear_kv_up_proj = column(latent.kv_rank, latent.heads * (latent.nope_dim + latent.value_dim))
        self.core_attention = core(config, layer_number)
        self.linear_proj = RowParallelLinear(
            latent.heads * latent.value_dim, hidden, config=config, init_method=nn.Identity(), bias=False,
            input_is_parallel=True, skip_bias_add=True, tp_group=self.tp,
        )  # fmt: skip

    @classmethod
    def fill(cls, layer: Any, kind: Latent, mesh: Mesh, options: BuildOptions) -> None:
        fill_attention(layer, cls, kind, options, core=core_attention(kind, mesh, options))

    def forward(
        self, hidden: Tensor, attention_mask=None, *, rotary_pos_emb: Tensor, packed_seq_params, **unused
    ) -> tuple[Tensor, Tensor | None]:
        """hidden: [R (/tp if sequence-parallel), 1, hidden]; rotary_pos_emb: a `rotary_table`."""
        del attention_mask, unused
        latent = self.latent
        query_latent = hidden if latent.q_rank is None else self.q_layernorm(self.linear_q_down_proj(hidden))
        kv_latent, key_rope = self.linear_kv_down_proj(hidden).split([latent.kv_rank, latent.rope_dim], -1)
        latents = query_latent, self.kv_layernorm(kv_latent), key_rope, rotary_pos_emb

        def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self.core_attention(query, key, value, None, packed_seq_params=packed_seq_params)

        attend = partial(checkpoint, core, False) if "core_attn" in self.recomputed else core
        if "mla_up_proj" not in self.recomputed:
            return self.linear_proj(attend(*self._project_up(*latents)))
        up = CheckpointWithoutOutput()
        out = attend(*up.checkpoint(self._project_up, *latents))
        up.discard_output_and_register_recompute(out)
        return self.linear_proj(out)

    def _project_up(
        self, query_latent: Tensor, kv_latent: Tensor, key_rope: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [R, 1, H, head_dim], values [R, 1, H, value_dim]."""
        latent = self.latent
        up = self.linear_q_proj if latent.q_rank is None else self.linear_q_up_proj
        query = up(query_latent)[0].unflatten(-1, (self.heads, -1))

        kv = self.linear_kv_up_proj(kv_latent)[0].unflatten(-1, (self.heads, -1))
        key_nope, value = kv.split([latent.nope_dim, latent.value_dim], -1)
        # One rotated key for all heads: each TP rank adds its heads' part to the gradient. Models with latent attention
        # have experts, which TP without sequence parallelism is refused for.
        key_rope = gather_rows(key_rope, self.tp)
        key_rope = self._rotated(key_rope[:, :, None], table).expand(-1, -1, self.heads, -1)
        return self._rotated(query, table), torch.cat([key_nope, key_rope], -1), value
