"""Gated DeltaNet (arXiv:2412.06464), in Megatron's attention slot.

Parameters, their order over TP ranks and their names in a checkpoint are those of Megatron's GatedDeltaNet, which
refuses packed rows and, in 0.16, context ranks.

Letters: R tokens of this rank's slice of a packed row, T of the whole row, H value heads and K key heads of this TP
rank or of this rank's share of the row, D width of a key, U of a value.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from isoloss.models.kinds.gated_delta import DELTA_SECTIONS, GatedDelta
from isoloss.models.mcore.layer_config import BuildOptions, LayerConfig
from isoloss.models.mcore.layers.core_attention import fill_attention
from isoloss.models.mcore.layers.norm import gated_norm
from isoloss.parallel import Mesh
from isoloss.parallel.attention import PackedRow, kv_repeats
from isoloss.parallel.collectives import sum_gradient
from isoloss.parallel.head_exchange import HeadExchange
from isoloss.parallel.ops import flash_linear_attention
from isoloss.parallel.ops.fused import precise
from isoloss.parallel.ops.gated_delta import DeltaInputs, delta_rule, delta_rule_and_states, delta_rule_next
from isoloss.parallel.ops.kv_cache import KeyValueCache
from isoloss.parallel.ops.prefix_scan import convolve_forest, scan_forest
from isoloss.parallel.ops.short_convolution import convolution_next, last_tokens, short_convolution

CONV = DELTA_SECTIONS[:3]
TWIN = short_convolution, delta_rule, delta_rule_and_states
FAST = (
    flash_linear_attention.short_convolution,
    flash_linear_attention.delta_rule,
    flash_linear_attention.delta_rule_and_states,
)


class GatedDeltaNet(MegatronModule):
    """exchange: over the ranks that share a row. Of what Megatron recomputes selectively it knows `core_attn`: the
    convolution and the rule.

    Weights of heads (conv1d, A_log, dt_bias) are whole on every context rank, which uses those of its share; what a
    rank does not use gets no gradient there, and Megatron sums over the context group. `out_norm` is whole on every TP
    rank, and its gradient is summed over TP here, as each has other heads."""

    config: LayerConfig

    def __init__(
        self,
        config: LayerConfig,
        *,
        layer_number: int,
        kind: GatedDelta,
        exchange: HeadExchange,
        pg_collection,
        **unused,
    ):
        super().__init__(config)
        del unused
        self.layer_number, self.delta, self.exchange, self.tp = layer_number, kind, exchange, pg_collection.tp
        delta, ranks, hidden = kind, self.tp.size(), config.hidden_size
        self.key_heads, self.value_heads = delta.key_heads // ranks, delta.value_heads // ranks
        self.with_kernels = config.kernels.delta_rule
        self.recomputes_core = "core_attn" in config.recomputed

        keys, values = self.key_heads * delta.key_dim, self.value_heads * delta.value_dim
        self.sections = keys, keys, values, values, self.value_heads, self.value_heads  # on this rank
        common = {"config": config, "init_method": nn.Identity(), "bias": False, "tp_group": self.tp}
        self.in_proj = ColumnParallelLinear(hidden, sum(self.sections) * ranks, gather_output=False, **common)
        self.conv1d = _Weight(config, (sum(self.sections[:3]), 1, delta.conv_width))
        self.out_norm = _Weight(config, (delta.value_dim,))
        self.A_log = _parameter(config, (self.value_heads,))
        self.dt_bias = _parameter(config, (self.value_heads,))
        for sharded in (self.conv1d.weight, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(sharded, True, 0, 1)
        self.norm_eps = config.layernorm_epsilon
        self.out_proj = RowParallelLinear(values * ranks, hidden, input_is_parallel=True, skip_bias_add=True, **common)

    @classmethod
    def fill(cls, layer: Any, kind: GatedDelta, mesh: Mesh, options: BuildOptions) -> None:
        fill_attention(layer, cls, kind, options, exchange=HeadExchange.over(mesh))

    def forward(
        self, hidden: Tensor, attention_mask=None, *, rotary_pos_emb=None, packed_seq_params, **unused
    ) -> tuple[Tensor, Tensor | None]:
        """hidden: [R (/tp if sequence-parallel), 1, hidden]."""
        del attention_mask, rotary_pos_emb, unused
        row = packed_seq_params
        assert isinstance(row, PackedRow)
        mixed_R = self.in_proj(hidden)[0].squeeze(1)
        parts = mixed_R.split([sum(self.sections[:3]), *self.sections[3:]], 1)
        qkv_R, gate_R, rate_RH, decay_RH = parts

        core = partial(self._core, row) if row.cache is None else partial(self._with_cache, row, row.cache)
        attend = partial(checkpoint, core, False) if self.recomputes_core else core
        out_RHU = attend(qkv_R, rate_RH, decay_RH).unflatten(1, (self.value_heads, -1))

        weight = sum_gradient(self.out_norm.weight, self.tp)
        gate_RHU, one_kernel = gate_R.unflatten(1, (self.value_heads, -1)), self.config.kernels.activation
        out_RHU = gated_norm(out_RHU, gate_RHU, weight, self.norm_eps, one_kernel=one_kernel)
        return self.out_proj(out_RHU.flatten(1)[:, None])

    def _core(self, row: PackedRow, qkv_R: Tensor, rate_RH: Tensor, decay_RH: Tensor) -> Tensor:
        """[R, H * U]: convolution and rule of the projections, whole documents at a time."""
        exchange, ranks = self.exchange, self.exchange.ranks
        conv_XK = self.conv1d.weight.squeeze(1)
        A_log, dt_bias = exchange.own(self.A_log), exchange.own(self.dt_bias)
        heads, keys = self.value_heads // ranks, self.key_heads
        if ranks == 1:
            qkv_T, rate_TH, decay_TH = qkv_R, rate_RH, decay_RH
        else:
            repeats = kv_repeats(self.value_heads, keys, ranks)
            keys = keys * repeats // ranks
            by_head = partial(self._by_head, repeats=repeats)
            whole_T = exchange.to_heads([*by_head(qkv_R), rate_RH, decay_RH], row)
            qkv_T, rate_TH, decay_TH = whole_T.split([whole_T.shape[1] - 2 * heads, heads, heads], 1)
            conv_XK = torch.cat([exchange.own(part.T) for part in by_head(conv_XK.T)])

        fast = self.with_kernels and flash_linear_attention.takes(qkv_T)
        convolution, rule, rule_and_states = FAST if fast else TWIN
        convolved_T = convolve_forest(convolution, qkv_T, conv_XK, row.forest, row.uploads)
        given = self._given(convolved_T, rate_TH, decay_TH, A_log, dt_bias, keys)
        out_THU = scan_forest(rule, rule_and_states, given, row.forest, row.uploads)
        return exchange.to_tokens(out_THU.flatten(1), row)

    def _with_cache(
        self, row: PackedRow, cache: KeyValueCache, qkv_R: Tensor, rate_RH: Tensor, decay_RH: Tensor
    ) -> Tensor:
        """`_core` where rows are generated, and every rank has a row of its own."""
        conv_XK, given = self.conv1d.weight.squeeze(1), partial(self._given, A_log=self.A_log, dt_bias=self.dt_bias)
        if cache.reads_prompts:
            prompts = cache.prompts
            convolved_R = short_convolution(qkv_R, conv_XK, row.lengths, row.uploads)
            of_rule = given(convolved_R, rate_RH, decay_RH, keys=self.key_heads)
            out_RHU, state_SHDU = delta_rule_and_states(of_rule, row.lengths, row.uploads)
            inputs_SKX = last_tokens(qkv_R, prompts, self.delta.conv_width - 1)
            cache.keep_states(self.layer_number, inputs_SKX, state_SHDU[: len(prompts)])
            return out_RHU.flatten(1)
        rows, kept = len(cache.behind), cache.states(self.layer_number)  # the others are padding
        convolved_B, kept[0] = convolution_next(qkv_R[:rows], kept[0], conv_XK)
        of_rule = given(convolved_B, rate_RH[:rows], decay_RH[:rows], keys=self.key_heads)
        return pad(delta_rule_next(of_rule, kept[1]).flatten(1), (0, 0, 0, len(qkv_R) - rows))

    def _given(
        self, convolved: Tensor, rate: Tensor, decay: Tensor, A_log: Tensor, dt_bias: Tensor, keys: int
    ) -> DeltaInputs:
        """Return the delta rule's inputs: queries, keys, values, log decays and rates. keys: number of key heads."""
        widths = keys * self.delta.key_dim, keys * self.delta.key_dim
        query, key, value = convolved.split([*widths, convolved.shape[1] - sum(widths)], 1)
        log_decay = -precise(A_log).exp() * softplus(precise(decay) + precise(dt_bias))
        query, key, value = (t.unflatten(1, (n, -1)) for t, n in ((query, keys), (key, keys), (value, len(A_log))))
        return DeltaInputs(query, key, value, log_decay, precise(rate).sigmoid())

    def _by_head(self, qkv: Tensor, repeats: int) -> list[Tensor]:
        """Queries, keys and values of [rows, channels], each key head as often as ranks need it."""
        query, key, value = qkv.split(self.sections[:3], 1)
        if repeats > 1:
            query, key = (
                t.unflatten(1, (self.key_heads, -1)).repeat_interleave(repeats, 1).flatten(1) for t in (query, key)
            )
        return [query, key, value]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Megatron's keys: sections of queries, keys, ... each as a tensor, so that any TP can read them."""
        assert metadata is not None
        state = make_sharded_tensors_for_checkpoint(
            {"A_log": self.A_log, "dt_bias": self.dt_bias, "conv1d.weight": self.conv1d.weight,
             "out_norm.weight": self.out_norm.weight},
            prefix, {"A_log": 0, "dt_bias": 0, "conv1d.weight": 0}, sharded_offsets,
            tp_group=self.tp, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
        for name in ("in_proj", "out_proj"):
            module = getattr(self, name)
            state |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp)
        for name, sections in (("in_proj.weight", DELTA_SECTIONS), ("conv1d.weight", CONV)):
            state[prefix + name] = _by_section(state[prefix + name], self.sections[: len(sections)], sections)
        return state


def _parameter(config: LayerConfig, shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device()))


class _Weight(nn.Module):
    """A parameter by the name that a module of Megatron's gives it."""

    def __init__(self, config: LayerConfig, shape: tuple[int, ...]):
        super().__init__()
        self.weight = _parameter(config, shape)


def _by_section(whole: ShardedTensor, sizes: Sequence[int], names: Sequence[str]) -> ShardedTensorFactory:
    """Each TP rank holds a part of every section; in a checkpoint each section is a tensor."""
    assert whole.data is not None
    empty = whole.without_data()

    @torch.no_grad()
    def build(key, data, replica_id, flattened_range) -> Any:
        assert flattened_range is None
        full, start, parts = replace(empty, key=key, data=data, dtype=data.dtype, replica_id=replica_id), 0, []
        for size, name in zip(sizes, names, strict=True):
            parts += [replace(part, key=f"{key}.{name}") for part in full.narrow(0, start, size)]
            start += size
        return parts

    def merge(parts):
        return torch.cat(parts)

    return ShardedTensorFactory(whole.key, whole.data, build, merge, whole.replica_id)
