"""What Megatron-Core calls a weight in a distributed checkpoint, and where in that tensor it stands.

Checkpoints use the names of Transformer Engine's layer spec, whose fused layers own the norm before them, with or
without Transformer Engine. There are three styles, all written by Megatron-Core 0.16:

- STACKED: all layers of a kind in one tensor, with axes for the layer and the expert in front. Its default.
- PER_LAYER: a tensor for each layer, experts still stacked. Where layers differ (dense before sparse ones).
- SINGLETON: a tensor for each layer and expert, and gate and up apart (`singleton_local_shards`).
"""

import re
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise

from isoloss.models.architecture import Architecture
from isoloss.models.weights.mappings import GatedMLP, Sections
from isoloss.models.weights.weight_map import Weight

Shape = tuple[int, ...]


class Style(Enum):
    STACKED = "stacked"
    PER_LAYER = "per-layer"
    SINGLETON = "singleton"


@dataclass(frozen=True)
class CheckpointRows:
    """A run of rows of a weight in a checkpoint tensor.

    key: name of the tensor.
    axes: sizes of the axes in front of the weight's own.
    index: where it stands on them.
    rows: the weight's rows (dim 0) that this tensor holds, as (start, stop); the whole of it but for SINGLETON's gate
        and up.
    """

    key: str
    axes: Shape
    index: Shape
    rows: tuple[int, int]


def native_style(arch: Architecture) -> Style:
    """The style that Megatron-Core gives a model of this architecture by default, and that isoloss writes."""
    return Style.PER_LAYER if arch.layers_differ else Style.STACKED


def checkpoint_rows(weight: Weight, arch: Architecture, style: Style) -> tuple[CheckpointRows, ...]:
    """Where a weight stands in a checkpoint of this style: one place, or several for blocks that are kept apart."""
    axes: list[int] = []
    index: list[int] = []
    name = _te_name(weight, arch)
    if weight.layer is not None and style is Style.STACKED:
        name = name.replace(f"decoder.layers.{weight.layer}.", "decoder.layers.", 1)
        axes.append(arch.num_layers)
        index.append(weight.layer)
    if weight.expert is not None:
        assert arch.experts is not None
        local = f"experts.local_experts.{weight.expert}."
        if style is Style.SINGLETON:
            name = name.replace(local, f"experts.experts.{weight.expert}.", 1)
        else:
            name = name.replace(local, "experts.experts.", 1)
            axes.append(arch.experts.count)
            index.append(weight.expert)
    rows = weight.shape[0]
    if isinstance(weight.mapping, Sections):
        edges = pairwise((0, *accumulate(weight.mapping.sizes)))
        return tuple(
            CheckpointRows(f"{name}.{block}", tuple(axes), tuple(index), edge)
            for block, edge in zip(weight.mapping.names, edges)
        )
    if style is Style.SINGLETON and isinstance(weight.mapping, GatedMLP):
        half = rows // 2
        return (
            CheckpointRows(f"{name}_w", tuple(axes), tuple(index), (0, half)),
            CheckpointRows(f"{name}_v", tuple(axes), tuple(index), (half, rows)),
        )
    return (CheckpointRows(name, tuple(axes), tuple(index), (0, rows)),)


# Norms by the beginning of their name: as they are in the local layer spec, and as part of the layer behind them.
FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
# In layers of Gated DeltaNet.
FUSED_DELTA_NORM = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}


def te_prefixes(arch: Architecture, layer: int) -> dict[str, str]:
    """The norms that Transformer Engine's spec fuses in this layer, as in `FUSED_NORMS`."""
    fused: list[str] = []
    if arch.latent is None and not arch.is_linear(layer):
        fused.append("input_layernorm.")
    elif arch.latent is not None:
        if arch.latent.q_rank is not None:
            fused.append("self_attention.q_layernorm.")
        fused.append("self_attention.kv_layernorm.")
    if not arch.has_experts(layer):
        fused.append("pre_mlp_layernorm.")
    return {name: FUSED_NORMS[name] for name in fused} | (FUSED_DELTA_NORM if arch.is_linear(layer) else {})


def local_name(name: str, arch: Architecture, layer: int) -> str:
    """What the weight map calls a parameter of this layer, whichever spec made it; both names as within the layer.

    Modules of Transformer Engine own the norm before them, and one holds all experts of a rank: `linear_fc1.weight3`.
    """
    for local, fused in te_prefixes(arch, layer).items():
        if name.startswith(fused):
            return local + name.removeprefix(fused)
    return re.sub(r"^mlp\.experts\.(linear_fc[12]\.[a-z]+)(\d+)$", r"mlp.experts.local_experts.\2.\1", name)


def _te_name(weight: Weight, arch: Architecture) -> str:
    if weight.layer is None:
        return weight.name
    layer = f"decoder.layers.{weight.layer}."
    for local, fused in te_prefixes(arch, weight.layer).items():
        if weight.name.startswith(layer + local):
            return weight.name.replace(layer + local, layer + fused, 1)
    return weight.name
