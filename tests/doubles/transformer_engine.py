"""A stand-in for the package `transformer_engine`, with which models of Megatron-Core's TE spec run on a CPU.

With this folder and tests/oracles/mbridge on PYTHONPATH, `import transformer_engine` finds it. The modules are those of
te_stub.py, which has their parameters, with a forward in plain torch, the attributes that the real ones set on their
parameters (reset_parameters of transformer_engine/pytorch/module/*.py, 2.11) and what they assert of their arguments.
Attention gathers the row over the context ranks, so it is right for any order of exchange but for none of tokens.
"""

import sys
from types import SimpleNamespace

import te_stub
import torch
from te_stub import RMSNorm as ParametersOfRMSNorm
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

__version__ = "2.11.0"


class _Module(nn.Module):
    """fp8 is off: the extra state is an empty tensor, of which None is as good."""

    fp8_meta, fp8, fp8_calibration = {"fp8_checkpoint": False}, False, False

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state) -> None:
        assert state is None or state.numel() == 0

    def init_fp8_metadata(self, num_gemms: int) -> None:
        del num_gemms


class RMSNorm(_Module, ParametersOfRMSNorm):
    def __init__(self, *, eps, sequence_parallel, zero_centered_gamma=False, **size):
        super().__init__(**size)
        self.eps, self.offset = eps, float(zero_centered_gamma)
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x):
        return rms_norm(x, self.weight.shape, self.weight + self.offset, self.eps)


class Linear(_Module, te_stub.Linear):
    def __init__(
        self, in_features, out_features, *, tp_size, tp_group, parallel_mode, bias, return_bias, sequence_parallel, **_
    ):
        super().__init__(in_features, out_features, tp_size=tp_size, parallel_mode=parallel_mode, bias=bias)
        self.parallel_mode, self.tp_group, self.return_bias, self.use_bias = parallel_mode, tp_group, return_bias, bias
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        _mark(self.weight, self.bias if bias else None, parallel_mode, self.sequence_parallel)

    def forward(self, x, is_first_microbatch=None):
        del is_first_microbatch
        out = self._leave(linear(self._enter(x), self.weight))
        if not self.use_bias:
            return out
        return (out, self.bias) if self.return_bias else out + self.bias

    def _enter(self, x):
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode != "column":
            return x
        if self.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(x, group=self.tp_group)
        return mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)

    def _leave(self, x):
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode != "row":
            return x
        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(x, group=self.tp_group)
        return mappings.reduce_from_tensor_model_parallel_region(x, group=self.tp_group)


class LayerNormLinear(te_stub.LayerNormLinear, Linear):
    def __init__(self, in_features, out_features, *, eps, normalization, zero_centered_gamma=False, **options):
        super().__init__(in_features, out_features, **options)
        assert normalization == "RMSNorm"
        self.eps, self.offset = eps, float(zero_centered_gamma)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(self, x, is_first_microbatch=None):
        normed = rms_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight + self.offset, self.eps)
        return Linear.forward(self, normed, is_first_microbatch)


class GroupedLinear(_Module, te_stub.GroupedLinear):
    def __init__(
        self, num_gemms, in_features, out_features, *, bias, return_bias, parallel_mode, sequence_parallel, **_
    ):
        super().__init__(num_gemms, in_features, out_features)
        self.use_bias, self.return_bias = bias, return_bias
        for expert in range(num_gemms):
            of_expert = nn.Parameter(torch.full((out_features,), torch.nan)) if bias else None
            if of_expert is not None:
                setattr(self, f"bias{expert}", of_expert)
            _mark(getattr(self, f"weight{expert}"), of_expert, parallel_mode, sequence_parallel)

    def forward(self, x, m_splits, is_first_microbatch=None):
        del is_first_microbatch
        assert isinstance(m_splits, list) and sum(m_splits) == x.shape[0] and len(m_splits) == self.num_gemms
        out = [linear(part, getattr(self, f"weight{e}")) for e, part in enumerate(x.split(m_splits))]
        biases = [getattr(self, f"bias{e}") for e in range(self.num_gemms)] if self.use_bias else []
        if biases and self.return_bias:
            return torch.cat(out), biases
        return torch.cat([part + bias for part, bias in zip(out, biases)] if biases else out)


def _mark(weight, bias, parallel_mode, sequence_parallel) -> None:
    """The weight of every linear layer is called a TP shard, also where there is no tensor parallelism."""
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, int(parallel_mode == "row"), 1
    if bias is None:
        return
    if parallel_mode == "row":
        bias.sequence_parallel = sequence_parallel
    elif parallel_mode == "column":
        bias.tensor_model_parallel, bias.partition_dim, bias.partition_stride = True, 0, 1


class DotProductAttention(_Module):
    """received: the arguments of the last call."""

    def __init__(
        self, num_attention_heads, kv_channels, *, num_gqa_groups, softmax_scale, tp_size, attn_mask_type,
        attention_type, attention_dropout, window_size=None, cp_group=None, cp_global_ranks=None,
        cp_comm_type="p2p", softmax_type="vanilla", **_,
    ):  # fmt: skip
        super().__init__()
        assert (attn_mask_type, attention_type) == ("causal", "self")
        self.dropout = attention_dropout
        assert softmax_type == "vanilla" and num_attention_heads % num_gqa_groups == 0
        self.heads, self.kv_heads = num_attention_heads // tp_size, num_gqa_groups // tp_size
        self.channels, self.scale, self.window = kv_channels, softmax_scale, window_size
        # From the innermost, as the real one wants them.
        self.cp_groups = cp_group if isinstance(cp_group, list) else [cp_group] if cp_group else []
        self.cp_comm_type = cp_comm_type
        assert (cp_comm_type == "a2a+p2p") == (len(self.cp_groups) == 2) or not self.cp_groups
        assert not self.cp_groups or len(cp_global_ranks) == self._cp_size()
        self.received = {}

    def _cp_size(self) -> int:
        size = 1
        for group in self.cp_groups:
            size *= group.size()
        return size

    def _cp_rank(self) -> int:
        rank, size = 0, 1
        for group in self.cp_groups:
            rank, size = rank + group.rank() * size, size * group.size()
        return rank

    def forward(self, query, key, value, attention_mask, **arguments):
        self.received = {**arguments, "window": self.window, "cp_comm_type": self.cp_comm_type}
        starts = arguments["cu_seqlens_q"]
        self._check(query, key, value, attention_mask, arguments)
        order = self._order(starts.diff().tolist())
        query, key, value = (self._gather(t)[order.argsort()] for t in (query, key, value))
        key, value = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (key, value))
        outputs = [
            self._one_document(query[a:b], key[a:b], value[a:b])
            for a, b in zip(starts[:-1].tolist(), starts[1:].tolist())
        ]
        return torch.cat(outputs)[order].chunk(self._cp_size())[self._cp_rank()].flatten(1)

    def _check(self, query, key, value, attention_mask, arguments) -> None:
        starts, size = arguments["cu_seqlens_q"], self._cp_size()
        lengths = starts.diff()
        assert arguments["qkv_format"] == "thd" and arguments["attn_mask_type"] == "padding_causal"
        assert self.dropout == 0.0 and attention_mask is None and query.ndim == key.ndim == value.ndim == 3
        assert query.shape[1:] == (self.heads, self.channels)
        assert key.shape[1:] == value.shape[1:] == (self.kv_heads, self.channels)
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
            assert torch.equal(arguments[name], starts) and arguments[name].dtype == torch.int32
        assert arguments["max_seqlen_q"] == arguments["max_seqlen_kv"] == int(lengths.max())
        assert query.shape[0] * size == int(starts[-1])
        if size > 1:
            assert not bool((lengths % (2 * size)).any())
            assert self.window is None or self.cp_comm_type in ("a2a", "all_gather")
        if self.cp_comm_type.startswith("a2a") and self.cp_groups:
            assert self.heads % self.cp_groups[0].size() == self.kv_heads % self.cp_groups[0].size() == 0
            assert self.channels % 8 == 0

    def _order(self, lengths: list[int]) -> Tensor:
        """The tokens of the row in the order of context ranks: rank r has chunks r and 2P - 1 - r of each document."""
        size = self._cp_size()
        if size == 1:
            return torch.arange(sum(lengths))
        chunks = [part.chunk(2 * size) for part in torch.arange(sum(lengths)).split(lengths)]
        return torch.cat([of[c] for rank in range(size) for of in chunks for c in (rank, 2 * size - 1 - rank)])

    def _gather(self, x: Tensor) -> Tensor:
        from isoloss.parallel.collectives import gather_rows

        for group in self.cp_groups:
            x = gather_rows(x, group)
        return x

    def _one_document(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        place = torch.arange(len(query))
        distance = place[:, None] - place[None, :]
        hidden = distance < 0
        if self.window is not None:
            hidden |= distance > self.window[0]
        logits = torch.einsum("qhd,khd->hqk", query, key) * self.scale
        return torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), value)


def _permutation():
    """transformer_engine.pytorch.permutation: tokens sorted by expert, and back."""

    def moe_permute_with_probs(inp, probs, routing_map, num_out_tokens=-1):
        expert, token = routing_map.T.nonzero(as_tuple=True)
        assert num_out_tokens in (-1, len(token))
        return inp[token], None if probs is None else probs[token, expert], token

    def moe_permute(inp, routing_map, num_out_tokens=-1):
        out, _, token = moe_permute_with_probs(inp, None, routing_map, num_out_tokens)
        return out, token

    def moe_unpermute(inp, row_id_map, merging_probs=None, restore_shape=None):
        assert merging_probs is None and restore_shape is not None
        return inp.new_zeros(restore_shape).index_add(0, row_id_map, inp)

    def moe_sort_chunks_by_index(inp, split_sizes, sorted_index):
        parts = inp.split(split_sizes.tolist())
        return torch.cat([parts[i] for i in sorted_index.tolist()])

    def moe_sort_chunks_by_index_with_probs(inp, probs, split_sizes, sorted_index):
        return tuple(moe_sort_chunks_by_index(t, split_sizes, sorted_index) for t in (inp, probs))

    return {name: function for name, function in locals().items() if name.startswith("moe_")}


globals().update(te_stub.members(sys.modules[__name__]))
te_stub.package("transformer_engine.pytorch.permutation", **_permutation())
# Imported or named by parts of Megatron-Core that are not used here.
ROUTER = ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
te_stub.package("transformer_engine.pytorch.router", **dict.fromkeys(ROUTER))
te_stub.package("transformer_engine.pytorch.tensor", QuantizedTensor=type("QuantizedTensor", (), {}))
pytorch.ops = SimpleNamespace(Sequential=object, FusibleOperation=object)  # noqa: F821
