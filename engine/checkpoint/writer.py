"""What a rank writes of a checkpoint: taken to host memory first, then to the disk, so that training can go on between.

The files are Megatron's. Its own asynchronous save forks a process for each file, of a process that has threads of CUDA
and gloo, and has the results come back through a manager process, which is spawned with a resource tracker. The two
stay for the rest of the run; if it is killed, for ever. A thread of this process is as fast: writing and checksums hold
no lock of Python's.
"""

import io
import queue
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
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

# torch writes 30 kB at a time, and training would wait for Python's lock as often.
_BLOCK = 1 << 20


class HostCopies:
    """Copies of tensors of the host, in memory that is kept from one checkpoint to the next. A large copy into memory
    that is new to the process takes several times as long, for the system clears every page of it first.

    What comes from a device needs none of this: torch keeps its pinned memory.
    """

    def __init__(self):
        self._free: defaultdict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self._taken: list[Tensor] = []

    def of(self, tensor: Tensor) -> Tensor:
        """A contiguous copy, which is good until `release`."""
        free = self._free[tensor.shape, tensor.dtype]
        copy = free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype)
        self._taken.append(copy)
        return copy.copy_(tensor.detach())

    def release(self) -> None:
        """Nobody needs the copies any more."""
        for copy in self._taken:
            self._free[copy.shape, copy.dtype].append(copy)
        self._taken.clear()


class Share(TorchDistSaveShardedStrategy):
    """A rank's share of the checkpoint in `folder`, held in host memory until `write` has put it there.

    replicas: the ranks that hold weights alike; each writes a share of them.
    copies: where tensors that are in host memory already are copied to, so that whoever holds them may change them.
    records: size and checksum of the files of tensors that this rank has written, by name.

    The constructor is collective over the world and over replicas; nothing else is.
    """

    def __init__(
        self, folder: Path, state: ShardedStateDict, replicas: dist.ProcessGroup, copies: HostCopies | None = None
    ):
        super().__init__("torch_dist", 1)
        self.records: dict[str, FileRecord] = {}
        self._folder, self._replicas, self._copies = folder, replicas, copies
        tensors: Any
        tensors, common = save_preprocess(state)
        self._common = io.BytesIO()
        if dist.get_rank() == 0:
            torch.save(common, self._common)
        self.async_save(tensors, folder)

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path, **strategy: str) -> AsyncRequest:
        """Megatron's planning of who writes what, of which nothing is left to do but `write` and `complete`."""
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
        # From a device to pinned memory, all at once; Megatron waits for it.
        self._buckets: list[WriteBucket] = request.preload_fn() if request.preload_fn else []
        writer.write_buckets = None
        return request._replace(async_fn=None, preload_fn=None, finalize_fns=[])

    def write(self) -> list[WriteResult]:
        """Write a file for each bucket, synced to disk, and let go of its memory; returns what went where."""
        written: list[WriteResult] = []
        for index in range(len(self._buckets)):
            answers: Any = queue.SimpleQueue()
            unfinished: Any = queue.Queue()  # Megatron's writers count down in it
            unfinished.put(index)
            checksum, bucket = _Checksum(), self._buckets.pop(0)
            FileSystemWriterAsync.write_preloaded_data([checksum], index, bucket, answers, unfinished, use_fsync=True)
            _, results = answers.get()
            if isinstance(results, Exception):
                raise checksum.problem or results
            written += results
            self.records[bucket[1]] = checksum.record()
        return written

    def complete(self, written: Sequence[list[WriteResult]]) -> None:
        """The files that are rank 0's alone: what is no tensor, and where each tensor is. written: of every rank."""
        (self._folder / COMMON).write_bytes(self._common.getbuffer())
        self._storage.finish(self._metadata, list(written))
        save_config(CheckpointingConfig(self.backend, self.version), str(self._folder))


def share_writing(state: ShardedStateDict, replicas: dist.ProcessGroup) -> None:
    """Divide the tensors that these ranks hold alike evenly among them, as Megatron's FullyParallelSaveStrategyWrapper
    does. The parts of the distributed optimizer, which form no regular grid, differ from rank to rank already.

    Collective over replicas: one all-gather of what the tensors are called and measure.
    """
    alike: Any = dict(enumerate(t for t in nested_values(state) if isinstance(t, ShardedTensor) and t.has_regular_grid))
    shares = determine_main_replica_uniform_distribution(alike, replicas)
    distribute_main_replicas_with_precomputed_distribution(alike, replicas, shares)


def _copy_from_host(state: ShardedStateDict, copies: HostCopies) -> None:
    """Give what this rank writes of tensors in host memory a copy of its own; those of a device are copied anyway."""
    for tensor in nested_values(state):
        if not isinstance(tensor, ShardedTensor) or not is_main_replica(tensor.replica_id):
            continue
        if tensor.data is not None and tensor.data.device.type == "cpu":
            tensor.data = copies.of(tensor.data)


class _Checksum(_StorageWriterTransforms):
    """What torch passes everything through that goes into a file: counts the bytes, and computes their CRC-32.

    problem: of the disk, which torch tells as one of its own.
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
    """A part of a file, which stays open when the part is closed. count: gets every block, and how to write it."""

    def __init__(self, file: IO[bytes], count: Callable[[memoryview, Callable], int]):
        super().__init__()
        self._file, self._count = file, count

    def writable(self) -> bool:
        return True

    def write(self, block: Any) -> int:
        return self._count(memoryview(block), self._file.write)
