"""Megatron's way to save a checkpoint, without its helper processes; every rank writes its share."""

import queue
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, WriteBucket
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms

from isoloss.models.mcore import patches
from isoloss.models.weights.manifest import FileRecord


class SaveInProcess(TorchDistSaveShardedStrategy):
    """The default strategy of `dist_checkpointing.save`, with the same files, written by this process.

    Megatron's forks a process for each file, of a process that has threads of CUDA and gloo, and has the results come
    back through a manager process, which is spawned with a resource tracker. The two stay for the rest of the run; if
    it is killed, for ever. But a save that is waited for gains nothing from them.

    replicas: the ranks that hold weights alike; each writes a share of them.
    records: size and checksum of the files that this rank wrote, by name.
    """

    def __init__(self, replicas: dist.ProcessGroup):
        super().__init__("torch_dist", 1)
        self.replicas = replicas
        self.records: dict[str, FileRecord] = {}

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path, **strategy: str) -> AsyncRequest:
        patches.collect_results_in_process()
        patches.save_without_advice()
        share_writing(sharded_state_dict, self.replicas)
        return super().async_save(sharded_state_dict, checkpoint_dir, **strategy)

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, save_state_dict_ret: Any, *strategy: str
    ) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, *strategy)
        return request._replace(async_fn=self._write if request.async_fn else None)

    def _write(self, rank: int, buckets: Sequence[WriteBucket], results: queue.SimpleQueue) -> None:
        """Write a file for each bucket, synced to disk; puts into results what was written, or the exception."""
        del rank
        written = {}
        for index, bucket in enumerate(buckets):
            answers: Any = queue.SimpleQueue()
            unfinished: Any = queue.Queue()  # Megatron's writers count down in it
            unfinished.put(index)
            checksum = _Checksum()
            FileSystemWriterAsync.write_preloaded_data([checksum], index, bucket, answers, unfinished, use_fsync=True)
            _, written[index] = answers.get()
            if isinstance(written[index], Exception):
                results.put(written[index])
                return
            self.records[bucket[1]] = checksum.record()
        results.put(written)


def share_writing(state: ShardedStateDict, replicas: dist.ProcessGroup) -> None:
    """Divide the tensors that these ranks hold alike evenly among them, as Megatron's FullyParallelSaveStrategyWrapper
    does. The parts of the distributed optimizer, which form no regular grid, differ from rank to rank already.

    Collective over replicas: one all-gather of what the tensors are called and measure.
    """
    alike: Any = dict(enumerate(t for t in nested_values(state) if isinstance(t, ShardedTensor) and t.has_regular_grid))
    shares = determine_main_replica_uniform_distribution(alike, replicas)
    distribute_main_replicas_with_precomputed_distribution(alike, replicas, shares)


class _Checksum(_StorageWriterTransforms):
    """What torch passes everything through that goes into a file: counts the bytes, and computes their CRC-32."""

    def __init__(self):
        super().__init__()
        self._bytes = self._crc32 = 0

    def transform_save_stream(self, write_item: Any, raw_stream: Any) -> tuple[IO[bytes], list[str]]:
        stream, descriptors = super().transform_save_stream(write_item, raw_stream)
        write = stream.write

        def counted(block: Any) -> int:
            self._bytes += memoryview(block).nbytes
            self._crc32 = zlib.crc32(block, self._crc32)
            return write(block)

        stream.write = counted
        return stream, descriptors

    def record(self) -> FileRecord:
        return FileRecord(self._bytes, f"{self._crc32:08x}")
