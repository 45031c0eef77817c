"""Write a rank's share of a checkpoint: copy it to host memory, then write it to disk while training goes on.

The format of the files is Megatron's. Its own asynchronous save is not used: it forks a process per file from a process
with threads of CUDA and gloo, and returns results through a manager process and a resource tracker, which stay until
the run ends, and for ever if it is killed. A thread is as fast, as writing and checksums release Python's lock.
"""

import io
import queue
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, WriteBucket
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.storage import WriteResult

from isoloss.models.mcore import patches
from isoloss.models.weights.manifest import FileRecord
from isoloss.models.weights.pickle_check import COMMON

# Bytes per write. torch writes 30 kB at a time, and training would wait for Python's lock at each.
_BLOCK = 1 << 20


class HostCopies:
    """Copies tensors of the host into memory that is reused by the next checkpoint."""

    # A copy into new memory takes several times as long, as the system clears each page first. Copies of device tensors
    # need no such pool: torch caches pinned memory.

    def __init__(self):
        self._free: defaultdict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self._taken: list[Tensor] = []

    def of(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy, valid until `release`."""
        free = self._free[tensor.shape, tensor.dtype]
        copy = free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype)
        self._taken.append(copy)
        return copy.copy_(tensor.detach())

    def release(self) -> None:
        """Free all copies for reuse."""
        for copy in self._taken:
            self._free[copy.shape, copy.dtype].append(copy)
        self._taken.clear()


class Share(TorchDistSaveShardedStrategy):
    """A rank's share of the checkpoint in `folder`, held in host memory until `write`.

    extra: entry of the common state that rank 0 alone has to have. Those of other ranks are not looked at.
    replicas: group of the ranks with equal weights; each of them writes a part.
    copies: pool for copies of tensors in host memory, so that training may change them before they are written.
    records: size and checksum of the files of tensors that this rank has written, by name.

    The constructor is collective over the world and over `replicas`; no method is.
    """

    def __init__(
        self,
        folder: Path,
        state: ShardedStateDict,
        extra: Mapping[str, object],
        replicas: dist.ProcessGroup,
        copies: HostCopies | None = None,
    ):
        super().__init__("torch_dist", 1)
        self.records: dict[str, FileRecord] = {}
        self._folder, self._replicas, self._copies = folder, replicas, copies
        tensors: Any
        tensors, common = save_preprocess(state)
        self._common = io.BytesIO()
        if dist.get_rank() == 0:
            # Not part of `state`, whose common part Megatron sends to every rank, which compares it with its own.
            torch.save({**common, "extra": dict(extra)}, self._common)
        self.async_save(tensors, folder)

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path, **strategy: str) -> AsyncRequest:
        """Let Megatron plan which rank writes which tensor. Only `write` and `complete` remain to be called."""
        patches.collect_results_in_process()
        patches.save_without_advice()
        share_writing(sharded_state_dict, self._replicas)
        if self._copies is not None:
            _copy_from_host(sharded_state_dict, self._copies)
        return super().async_save(sharded_state_dict, checkpoint_dir, **strategy)

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, save_state_dict_ret: Any, *strategy: str
    ) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, *strategy)
        self._storage, self._metadata = writer, save_state_dict_ret[1]
        # Copies all tensors from the device to pinned memory, and waits for the copies.
        self._buckets: list[WriteBucket] = request.preload_fn() if request.preload_fn else []
        writer.write_buckets = None
        return request._replace(async_fn=None, preload_fn=None, finalize_fns=[])

    def write(self) -> list[WriteResult]:
        """Write a file per bucket, synced to disk, and free its memory; return where each tensor was written."""
        written: list[WriteResult] = []
        for index in range(len(self._buckets)):
            outcome: Any = queue.SimpleQueue()
            unfinished: Any = queue.Queue()  # Megatron's writers count down by it
            unfinished.put(index)
            checksum, bucket = _Checksum(), self._buckets.pop(0)
            FileSystemWriterAsync.write_preloaded_data([checksum], index, bucket, outcome, unfinished, use_fsync=True)
            _, results = outcome.get()
            if isinstance(results, Exception):
                raise checksum.problem or results
            written += results
            self.records[bucket[1]] = checksum.record()
        return written

    def complete(self, written: Sequence[list[WriteResult]]) -> None:
        """Write rank 0's files: the common state, and the index of all tensors. written: results of every rank."""
        (self._folder / COMMON).write_bytes(self._common.getbuffer())
        self._storage.finish(self._metadata, list(written))
        save_config(CheckpointingConfig(self.backend, self.version), str(self._folder))


def share_writing(state: ShardedStateDict, replicas: dist.ProcessGroup) -> None:
    """Divide the tensors that all these ranks hold evenly among them, like Megatron's FullyParallelSaveStrategyWrapper.

    Collective over `replicas`: one all-gather of names and sizes of tensors.
    """
    # Shards of the distributed optimizer, which form no regular grid, differ from rank to rank already.
    equal: Any = dict(enumerate(t for t in nested_values(state) if isinstance(t, ShardedTensor) and t.has_regular_grid))
    shares = determine_main_replica_uniform_distribution(equal, replicas)
    distribute_main_replicas_with_precomputed_distribution(equal, replicas, shares)


def _copy_from_host(state: ShardedStateDict, copies: HostCopies) -> None:
    """Replace the tensors in host memory that this rank writes by copies; those of a device are copied anyway."""
    for tensor in nested_values(state):
        if not isinstance(tensor, ShardedTensor) or not is_main_replica(tensor.replica_id):
            continue
        if tensor.data is not None and tensor.data.device.type == "cpu":
            tensor.data = copies.of(tensor.data)


class _Checksum(_StorageWriterTransforms):
    """Counts the bytes of a file while torch writes it, and computes their CRC-32.

    problem: error of the disk, which torch hides behind an error of its own.
    """

    def __init__(self):
        super().__init__()
        self.problem: OSError | None = None
        self._bytes = self._crc32 = 0

    def transform_save_stream(self, write_item: Any, raw_stream: Any) -> tuple[IO[bytes], list[str]]:
        stream: Any = io.BufferedWriter(_Counted(raw_stream, self.count), _BLOCK)
        return stream, []

    def count(self, block: memoryview, write: Callable[[memoryview], int]) -> int:
        self._bytes += block.nbytes
        self._crc32 = zlib.crc32(block, self._crc32)
        try:
            return write(block)
        except OSError as problem:
            self.problem = problem
            raise

    def record(self) -> FileRecord:
        return FileRecord(self._bytes, f"{self._crc32:08x}")


class _Counted(io.RawIOBase):
    """A stream into a file that stays open when the stream is closed. count: function of a block and of its write."""

    def __init__(self, file: IO[bytes], count: Callable[[memoryview, Callable], int]):
        super().__init__()
        self._file, self._count = file, count

    def writable(self) -> bool:
        return True

    def write(self, block: Any) -> int:
        return self._count(memoryview(block), self._file.write)
