"""Describe a rank's part of a factor for a checkpoint, which any layout can load: its blocks of the whole factor."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from isoloss.models.kinds.mappings import Replicated, RowParallel, Vocabulary
from isoloss.models.model import LocalWeight
from isoloss.parallel import Mesh


def sharded(owned: LocalWeight, mesh: Mesh) -> ShardedTensor | ShardedTensorFactory:
    """Return this rank's part of a weight, under the name of the whole one."""
    weight, size, rank = owned.weight, owned.tp.size(), owned.tp.rank()
    replicas = mesh.dp_context if weight.expert is None else mesh.expert_dp
    copies = isinstance(weight.mapping, Replicated)
    replica = 0, rank if copies else 0, replicas.rank()
    if copies or (size == 1 and not isinstance(weight.mapping, Vocabulary)):
        return ShardedTensor.from_rank_offsets(weight.name, owned.parameter, replica_id=replica)
    if isinstance(weight.mapping, RowParallel):
        return ShardedTensor.from_rank_offsets(weight.name, owned.parameter, (1, rank, size), replica_id=replica)
    if isinstance(weight.mapping, Vocabulary):
        return _of_vocabulary(owned, replica)
    rows = weight.mapping.shard(torch.arange(weight.shape[0])[:, None], size, rank).flatten()
    runs = _runs(rows.tolist())
    if len(runs) == 1:
        return ShardedTensor.from_rank_offsets(weight.name, owned.parameter, (0, rank, size), replica_id=replica)

    @torch.no_grad()
    def build(key: str, data: Tensor, replica_id: Any, flattened_range: Any) -> Any:
        assert flattened_range is None
        pieces = zip(runs, data.split([len(run) for run in runs]))
        return [
            ShardedTensor(key, piece, piece.dtype, tuple(piece.shape), weight.shape, (run.start, 0), None, replica_id)
            for run, piece in pieces
        ]

    def merge(pieces: Any) -> Tensor:
        return torch.cat(pieces)

    return ShardedTensorFactory(weight.name, owned.parameter, build, merge, replica)


def _of_vocabulary(owned: LocalWeight, replica: Any) -> ShardedTensorFactory:
    """Return this rank's rows of the vocabulary without those that pad it, whose number depends on TP."""
    weight, rows = owned.weight, len(owned.parameter)
    start = owned.tp.rank() * rows
    true = min(max(weight.shape[0] - start, 0), rows)

    @torch.no_grad()
    def build(key: str, data: Tensor, replica_id: Any, flattened_range: Any) -> Any:
        assert flattened_range is None
        shape, offset = (true, *data.shape[1:]), (start, 0)
        if not true:
            return []
        return [ShardedTensor(key, data[:true], data.dtype, shape, weight.shape, offset, None, replica_id)]

    def merge(pieces: Any) -> Tensor:
        return torch.cat([*pieces, torch.zeros_like(owned.parameter)[true:]])

    return ShardedTensorFactory(weight.name, owned.parameter, build, merge, replica)


def _runs(rows: Sequence[int]) -> list[range]:
    """Return the runs of consecutive numbers."""
    runs: list[range] = []
    for row in rows:
        if runs and runs[-1].stop == row:
            runs[-1] = range(runs[-1].start, row + 1)
        else:
            runs.append(range(row, row + 1))
    return runs
