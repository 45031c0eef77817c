"""The product of queries, keys and values, and the place of isoloss's attention in Megatron's layer."""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from isoloss.models.kinds.kind import Attention, SoftmaxAttention
from isoloss.models.mcore.layer_config import BuildOptions
from isoloss.models.mcore.layers.norm import norm_class
from isoloss.parallel import Mesh
from isoloss.parallel.attention import PackedAttention
from isoloss.parallel.ops.block_attention import Heads


def core_attention(kind: SoftmaxAttention, mesh: Mesh, options: BuildOptions) -> Callable[..., nn.Module]:
    """Return what makes the core attention from (config, layer_number)."""
    heads = Heads(kind.scale, kind.window, flash=options.kernels.attention != "blocks")
    if mesh.cp_kernel != "isoloss":
        from isoloss.models.mcore.layers.te_attention import FusedAttention

        return partial(FusedAttention, scale=heads.scale, window=heads.window)
    groups = {"ulysses": mesh.ulysses, "ring": mesh.ring, "tp_group": mesh.tp}
    return partial(PackedAttention, **groups, sinks=bool(kind.sinks), heads=heads)


def fill_attention(layer: Any, module: type[nn.Module], kind: Attention, options: BuildOptions, **given: Any) -> None:
    """Put a module of isoloss into the slot of attention. Its projections own no norm, so the layer's slot has one."""
    layer.input_layernorm = norm_class(options)
    layer.self_attention = ModuleSpec(module=module, params={"kind": kind, **given})
