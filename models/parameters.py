"""The parameters of this rank, tied to the weight map: loading, gathering and exporting by name."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isoloss.models.architecture import Architecture
from isoloss.models.checkpoint_hf import WeightSource
from isoloss.models.gpt import unwrap
from isoloss.models.weights import Weight, weight_map
from isoloss.parallel import Mesh


@dataclass(frozen=True)
class Owned:
    """A parameter of this rank and the weight that it is a TP shard of.

    replica: the weight also lives on the first pipeline stage (a tied output matrix on the last one); whoever visits
    every weight once skips it.
    """

    weight: Weight
    parameter: nn.Parameter
    replica: bool


def owned_parameters(chunks: Sequence[nn.Module], arch: Architecture) -> list[Owned]:
    """Every parameter of this rank's model chunks, in model order. Raises KeyError for one the weight map lacks."""
    weights = {weight.name: weight for weight in weight_map(arch)}
    owned = []
    for chunk in chunks:
        model = unwrap(chunk)
        layers: Any = model.decoder.layers
        global_layer = {index: layer.layer_number - 1 for index, layer in enumerate(layers)}
        for name, parameter in model.named_parameters():
            replica = name == "output_layer.weight" and arch.tie_embeddings
            if replica:
                name = "embedding.word_embeddings.weight"
            elif name.startswith("decoder.layers."):
                _, _, index, rest = name.split(".", 3)
                name = f"decoder.layers.{global_layer[int(index)]}.{rest}"
            owned.append(Owned(weights[name], parameter, replica))
    return owned


@torch.no_grad()
def load_weights(chunks: Sequence[nn.Module], arch: Architecture, source: WeightSource, mesh: Mesh) -> None:
    """Fill this rank's parameters from Hugging Face tensors, one weight in memory at a time. No collectives."""
    for owned in owned_parameters(chunks, arch):
        whole = source.whole(owned.weight)
        owned.parameter.copy_(owned.weight.form.shard(whole, mesh.layout.tp, mesh.tp.rank()))


def gather(shard: Tensor, weight: Weight, mesh: Mesh) -> Tensor:
    """The whole of a TP-sharded tensor (a weight, a gradient), on every TP rank. One all-gather over tp."""
    if mesh.layout.tp == 1:
        return weight.form.unshard([shard])
    shards = [torch.empty_like(shard) for _ in range(mesh.layout.tp)]
    dist.all_gather(shards, shard.contiguous(), group=mesh.tp)
    return weight.form.unshard(shards)


def whole_tensors(
    chunks: Sequence[nn.Module], arch: Architecture, mesh: Mesh, of: Callable[[nn.Parameter], Tensor] = lambda p: p.data
) -> Iterator[tuple[Weight, Tensor]]:
    """Every weight of this pipeline stage, whole, one at a time (`of` picks the tensor: the data, the gradient ...).

    Collective over tp: all its ranks must iterate to the end.
    """
    for owned in owned_parameters(chunks, arch):
        if not owned.replica:
            yield owned.weight, gather(of(owned.parameter), owned.weight, mesh)


def hf_tensors(
    chunks: Sequence[nn.Module], arch: Architecture, mesh: Mesh, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and tensors of this pipeline stage, one weight in memory at a time. Collective over tp."""
    for weight, whole in whole_tensors(chunks, arch, mesh):
        yield from zip((part.tensor for part in weight.parts), (t.to(dtype).cpu() for t in weight.form.split(whole)))
