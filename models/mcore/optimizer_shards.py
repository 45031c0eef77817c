"""Save and load a rank's own part of the distributed optimizer, in its place in a checkpoint.

Megatron shards the optimizer by elements: a data-parallel rank has a run of the flattened parameters of its model
shard. A checkpoint knows blocks of tensors. So each run is described as the few blocks that it is made of, at their
place in the whole parameter. On the disk that is Megatron's format `fully_reshardable` (its names, shapes and dtypes),
in other pieces than its own code writes, which gathers the state of all data-parallel ranks on each of them first.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

STATE = ("param", "exp_avg", "exp_avg_sq")  # Megatron's names, in a checkpoint and of `_get_main_param_...`
Shape = tuple[int, ...]


def own_part(
    optimizer: DistributedOptimizer, models: ShardedStateDict, is_loading: bool = False, metadata: Any = None
) -> dict[int, dict[str, list[ShardedTensor]]]:
    """This rank's fp32 weights and moments, by parameter: views of the optimizer's memory, to write or to read into.

    models: the sharded state of the model, whose tensors are the parameters themselves.
    """
    del is_loading, metadata
    tensors, _ = extract_sharded_tensors_and_factories(models)
    of_parameter = {sharded.data: sharded for sharded in nested_values(tensors)}
    buckets = [bucket for maps in optimizer.gbuf_ranges for of_dtype in maps.values() for bucket in of_dtype]
    found = {}
    for bucket in buckets:
        for parameter, ranges in bucket["param_map"].items():
            sharded, run = of_parameter[parameter], ranges["param"]
            # A factory says how a parameter is cut: gate and up of an MLP stand apart in the whole tensor.
            parts = [sharded] if isinstance(sharded, ShardedTensor) else list(nested_values(sharded.build()))
            state = optimizer._get_main_param_and_optimizer_states(parameter)
            found[len(found)] = {
                name: [block for part in parts for block in _blocks(name, state[name], run.start, part, parameter)]
                for name in STATE
            }
    return found


def _blocks(name: str, state: Tensor, start: int, part: ShardedTensor, parameter: Tensor) -> Iterator[ShardedTensor]:
    """state: (elements) of the flattened parameter from `start` on. part: a range of it, as a shard of a tensor."""
    assert part.data is not None and part.data.is_contiguous() and isinstance(part.replica_id, tuple)
    begin = int(part.data.storage_offset() - parameter.storage_offset())
    low, high = max(start, begin), min(start + state.numel(), begin + part.data.numel())
    at, ones = low - start, (1,) * part.prepend_axis_num
    for offsets, sizes in blocks(tuple(part.local_shape), low - begin, high - begin):
        count = math.prod(sizes)
        yield replace(
            part,
            key=f"optimizer.state.{name}.{part.key}",
            data=state[at : at + count].view(*ones, *sizes),
            dtype=state.dtype,
            local_shape=(*ones, *sizes),
            global_offset=tuple(a + b for a, b in zip(part.global_offset, (*(0,) * len(ones), *offsets), strict=True)),
            axis_fragmentations=None,  # no regular grid
            prepend_axis_num=0,
            replica_id=(*part.replica_id[:-1], 0),  # no other data-parallel rank has it
        )
        at += count


def blocks(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """(offsets, sizes) of the blocks that elements start to stop of a row-major tensor consist of, in their order: at
    most two for each axis, less one."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # within one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Shape, index: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    for offsets, sizes in blocks(shape[1:], start, stop):
        yield (index, *offsets), (1, *sizes)
