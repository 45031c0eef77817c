"""Write the folder of an adapter, which PEFT and servers load."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from isoloss.models.lora.adapter import Adapter
from isoloss.models.lora.factors import factor_weights
from isoloss.models.lora.peft_config import CONFIG
from isoloss.models.lora.peft_folder import TENSORS, config_of, tensors_of
from isoloss.parallel import UserError
from isoloss.parallel.collectives import gather_objects


def export_adapter(folder: Path, adapter: Adapter, base: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors, with the names of a text model.

    base: folder of the model. Every rank writes its factors to the folder, and rank 0 joins them.
    Raises UserError on every rank if the folder holds an adapter. Collective over the world.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(gather_objects((folder / TENSORS).exists())):
        raise UserError(f"{folder} holds an adapter already; choose another folder, or delete it")
    arch = adapter.arch.text_only()
    # By name and not by a pattern: an export that was killed, with more ranks, may have left others.
    pieces = [folder / f".rank{rank:05}.safetensors" for rank in range(dist.get_world_size())]
    save_file({f"{index}": tensor for index, tensor in _own_parts(adapter)}, pieces[dist.get_rank()])
    dist.barrier()
    if dist.get_rank() == 0:
        values = {int(index): tensor for path in pieces for index, tensor in load_file(path).items()}
        parts = [part for weight in factor_weights(arch, adapter.lora) for part in weight.parts]
        tensors = tensors_of((part, values[index]) for index, part in enumerate(parts))
        (folder / CONFIG).write_text(json.dumps(config_of(arch, adapter.lora, str(base)), indent=2) + "\n")
        partial = folder / f".{TENSORS}"
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.rename(folder / TENSORS)
        for path in folder.glob(".rank*.safetensors"):
            path.unlink()
    dist.barrier()


def _own_parts(adapter: Adapter) -> Iterator[tuple[int, Tensor]]:
    """Yield what this rank writes: the place of a part among those of the adapter map, and its values. Collective over
    tp and etp."""
    place, start = dict[str, int](), 0
    for weight in factor_weights(adapter.arch, adapter.lora):
        place[weight.name] = start
        start += len(weight.parts)
    for owned, whole in adapter.whole_tensors():
        if owned.weight.name in place and owned.first and owned.tp.rank() == 0:
            for index, part in enumerate(owned.weight.mapping.split(whole)):
                yield place[owned.weight.name] + index, part.cpu().contiguous()
