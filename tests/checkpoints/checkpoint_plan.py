"""The bytes that every rank would write of a checkpoint, by dry runs, in a process of its own:
python -m checkpoints.checkpoint_plan MODEL WORLD_SIZE [key=value ...] prints them as JSON, with all bytes that it
holds."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

from isoloss.engine.checkpoint import checkpoint
from isoloss.engine.checkpoint.writer import share_writing  # before a dry run stands in for it
from isoloss.engine.config.schema import Config
from isoloss.engine.memory.nowhere import SimulatedRank, without_values
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.model_source import resolve
from isoloss.recipes.launch import compose_config
from isoloss.tools.plan.rank import NoWeights
from isoloss.tools.plan.world import join


def share_of(config: Config, rank: int, world_size: int, told: Mapping[int, Any]) -> tuple[int, int, Any]:
    """(bytes that the rank writes, bytes of its weights and optimizer, what it tells those that hold weights alike).

    told: what every rank tells; {}: each the same as this one, and then the bytes are not right.
    """
    recorder, telling = join(SimulatedRank(rank, world_size)), []

    def gather(objects: list, mine: Any, group: dist.ProcessGroup | None = None) -> None:
        telling.append(mine)
        objects[:] = [told.get(other, mine) for other in dist.get_process_group_ranks(group)]

    all_gather_object = dist.all_gather_object
    with without_values(recorder), recorder.phase("plan"):
        engine = Engine(config, replace(resolve(config), weights=NoWeights()))
        state = checkpoint._state(engine.model, engine.optimizer, is_loading=False)
        apply_factories(state)
        dist.all_gather_object = dist.distributed_c10d.all_gather_object = gather
        share_writing(state, engine.mesh.dp_context)
        dist.all_gather_object = dist.distributed_c10d.all_gather_object = all_gather_object
    tensors = [each for each in nested_values(state) if isinstance(each, ShardedTensor)]
    sizes = {id(each): prod(each.local_shape) * each.dtype.itemsize for each in tensors}
    written = sum(sizes[id(each)] for each in tensors if is_main_replica(each.replica_id))
    return written, sum(sizes.values()), telling[-1]


def main() -> None:
    folder, size, *keys = sys.argv[1:]
    keys = [f"model.path={folder}", "model.from_scratch=true", "memory.check=false", *keys]
    config, world_size = compose_config("sft", Config, keys)[0], int(size)
    told = {rank: share_of(config, rank, world_size, {})[2] for rank in range(world_size)}
    print(json.dumps([share_of(config, rank, world_size, told)[:2] for rank in range(world_size)]))


if __name__ == "__main__":
    main()
