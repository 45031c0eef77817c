"""Megatron's grouped-query attention, and one whose output is multiplied by a sigmoid of a gate next to the queries
(Qwen3-Next, arXiv:2505.06708).

With a gate, Megatron's projection holds, for each key/value head, its query heads, the gates of these, its key head
and its value head. Megatron computes the gate in fp32, which an fp64 model loses its precision by, and with more TP
ranks than key/value heads it leaves a rank the gates of all query heads of the group.
"""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from isoloss.models.kinds.grouped_query import GroupedQuery
from isoloss.models.mcore.layer_config import BuildOptions, LayerConfig
from isoloss.models.mcore.layers.core_attention import core_attention
from isoloss.models.mcore.layers.norm import JointHeadNorm, norm_class
from isoloss.parallel import Mesh
from isoloss.parallel.ops.fused import Fused, precise


class GroupedAttention(SelfAttention):
    """Megatron's, with our norms and core attention in its slots."""

    config: LayerConfig

    @classmethod
    def fill(cls, layer: Any, kind: GroupedQuery, mesh: Mesh, options: BuildOptions) -> None:
        layer.self_attention.module = cls
        attention = layer.self_attention.submodules
        attention.core_attention = core_attention(kind, mesh, options)
        if kind.qk_norm == "joint":
            for slot, heads in (("q_layernorm", kind.heads), ("k_layernorm", kind.kv_heads)):
                params = {"heads": heads, "tp_group": mesh.tp}
                setattr(attention, slot, ModuleSpec(module=JointHeadNorm, params=params))
        elif kind.qk_norm:
            attention.q_layernorm = attention.k_layernorm = norm_class(options)


class GatedAttention(GroupedAttention):
    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        split: Any = super().get_query_key_value_tensors(*args, **kwargs)
        query, key, value, gate = split
        heads = query.shape[2]
        if gate.shape[2] > heads:  # those of a whole group, of which this rank has `heads`
            tp = self.pg_collection.tp
            first = tp.rank() % (gate.shape[2] // heads) * heads
            gate = gate[:, :, first : first + heads]
        return query, key, value, gate

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x: [R, 1, H*U]; gate: [R, 1, H, U]."""
        return gated(x, gate.reshape(x.shape), one_kernel=self.config.kernels.activation)


def gated(x: Tensor, gate: Tensor, *, one_kernel: bool) -> Tensor:
    """x * sigmoid(gate)."""
    if one_kernel and x.is_cuda:
        return _Gated.apply(x, gate)
    return x * torch.sigmoid(gate)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        ctx.save_for_backward(x, gate)
        return gate_forward(x, gate)

    @staticmethod
    def backward(ctx, grad):
        return gate_backward(grad, *ctx.saved_tensors)


@Fused
def gate_forward(x: Tensor, gate: Tensor) -> Tensor:
    return (precise(x) * precise(gate).sigmoid()).to(x.dtype)


@Fused
def gate_backward(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    open_, grad_precise = precise(gate).sigmoid(), precise(grad)
    return (grad_precise * open_).to(x.dtype), (grad_precise * precise(x) * open_ * (1 - open_)).to(gate.dtype)
