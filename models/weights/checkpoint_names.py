"""The name of a weight's tensor in a Megatron-Core distributed checkpoint, and its place in that tensor.

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
from isoloss.models.kinds.layer import Layer
from isoloss.models.kinds.mappings import GatedMLP, Sections
from isoloss.models.kinds.weight import Weight

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
    """Return the places of a weight in a checkpoint of this style: one, or one for each block kept apart."""
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


def local_name(name: str, layer: Layer) -> str:
    """Return the weight map's name of a parameter of this layer, for either spec; both names are within the layer.

    Modules of Transformer Engine own the norm before them, and one holds all experts of a rank: `linear_fc1.weight3`.
    """
    for local, fused in layer.fused_norms().items():
        if name.startswith(fused):
            return local + name.removeprefix(fused)
    return re.sub(r"^mlp\.experts\.(linear_fc[12]\.[a-z]+)(\d+)$", r"mlp.experts.local_experts.\2.\1", name)


def _te_name(weight: Weight, arch: Architecture) -> str:
    if weight.layer is None:
        return weight.name
    layer = f"decoder.layers.{weight.layer}."
    for local, fused in arch.layers[weight.layer].fused_norms().items():
        if weight.name.startswith(layer + local):
            return weight.name.replace(layer + local, layer + fused, 1)
    return weight.name
