"""The parameters of this rank, tied to the weight map."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isoloss.models.architecture import Architecture
from isoloss.models.mcore.gpt import unwrap
from isoloss.models.weights.checkpoint_names import local_name
from isoloss.models.weights.weight_map import Weight, weight_map
from isoloss.parallel import Mesh


@dataclass(frozen=True)
class Owned:
    """A parameter (or buffer) of this rank and the weight that it is a TP shard of.

    tp: the group that the shards are spread over; for an expert that of its own tensor parallelism.
    replica: the weight also lives on the first pipeline stage (a tied output matrix on the last one); whoever visits
    every weight once skips it.
    first: whether, of the ranks of its stage that hold this very shard, this one is the first.
    """

    weight: Weight
    parameter: Tensor
    tp: dist.ProcessGroup
    replica: bool
    first: bool


def owned_parameters(chunks: Sequence[nn.Module], arch: Architecture, mesh: Mesh) -> list[Owned]:
    """Every parameter and buffer of this rank's model chunks, in model order.

    Raises KeyError for one the weight map lacks.
    """
    weights = {weight.name: weight for weight in weight_map(arch)}
    owned = []
    for chunk in chunks:
        model = unwrap(chunk)
        layers: Any = model.decoder.layers
        global_layer = {index: layer.layer_number - 1 for index, layer in enumerate(layers)}
        first_expert = mesh.ep.rank() * (arch.experts.count // mesh.layout.ep) if arch.experts else 0
        for name, parameter in model.state_dict(keep_vars=True).items():
            if name.endswith("_extra_state"):  # scales of fp8, which nothing here has
                continue
            replica = name == "output_layer.weight" and arch.tie_embeddings
            if replica:
                name = "embedding.word_embeddings.weight"
            elif name.startswith("decoder.layers."):
                name = _global_name(name, arch, global_layer, first_expert)
            weight = weights[name]
            if weight.expert is None:
                tp, first = mesh.tp, mesh.dp_context.rank() == 0
            else:
                tp, first = mesh.etp, mesh.expert_dp.rank() == 0
            owned.append(Owned(weight, parameter, tp, replica, first))
    return owned


def _global_name(name: str, arch: Architecture, global_layer: dict[int, int], first_expert: int) -> str:
    decoder, layers, index, *within = name.split(".")
    layer = global_layer[int(index)]
    rest = local_name(".".join(within), arch, layer).split(".")
    if "local_experts" in rest:
        place = rest.index("local_experts") + 1
        rest[place] = str(int(rest[place]) + first_expert)
    return ".".join([decoder, layers, str(layer), *rest])


def gather(shard: Tensor, owned: Owned) -> Tensor:
    """The whole of a TP-sharded tensor (a weight, a gradient), on every rank of its TP group. One all-gather."""
    if owned.tp.size() == 1:
        return owned.weight.form.unshard([shard])
    shards = [torch.empty_like(shard) for _ in range(owned.tp.size())]
    dist.all_gather(shards, shard.contiguous(), group=owned.tp)
    return owned.weight.form.unshard(shards)


def hf_tensors(
    whole: Iterable[tuple[Owned, Tensor]], ep: dist.ProcessGroup, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor, bool]]:
    """Hugging Face names and tensors of whole weights, and whether this rank is the one of all to write a tensor.

    One weight in memory at a time, or where a tensor holds all experts, one layer's. What is not trained stays fp32.
    Collective over tp and etp where `whole` is, and where tensors hold all experts over ep.
    """
    rows: dict[str, list[Tensor]] = {}
    for owned, weight_tensor in whole:
        weight = owned.weight
        for part, tensor in zip(weight.parts, weight.form.split(weight_tensor)):
            tensor = tensor.to(dtype if weight.trained else torch.float32)
            mine = owned.first and owned.tp.rank() == 0
            if part.rows is None:
                yield part.tensor, tensor, mine
                continue
            kept = rows.setdefault(part.tensor, [])
            kept.append(tensor)
            if len(kept) == part.rows // ep.size():
                yield part.tensor, _all_experts(rows.pop(part.tensor), ep), mine and ep.rank() == 0


def _all_experts(rows: list[Tensor], ep: dist.ProcessGroup) -> Tensor:
    stacked = torch.stack(rows)
    if ep.size() == 1:
        return stacked
    everyone = [torch.empty_like(stacked) for _ in range(ep.size())]
    dist.all_gather(everyone, stacked, group=ep)
    return torch.cat(everyone)
