"""Megatron's way to save a checkpoint, without its helper processes."""

import queue
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, WriteBucket
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from isoloss.models.mcore import patches


class SaveInProcess(TorchDistSaveShardedStrategy):
    """The default strategy of `dist_checkpointing.save`, with the same files, written by this process.

    Megatron's forks a process for each file, of a process that has threads of CUDA and gloo, and has the results come
    back through a manager process, which is spawned with a resource tracker. The two stay for the rest of the run; if
    it is killed, for ever. But a save that is waited for gains nothing from them.
    """

    def __init__(self):
        super().__init__("torch_dist", 1)

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path, **strategy: str) -> AsyncRequest:
        patches.collect_results_in_process()
        patches.save_without_advice()
        return super().async_save(sharded_state_dict, checkpoint_dir, **strategy)

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, save_state_dict_ret: Any, *strategy: str
    ) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, *strategy)
        return request._replace(async_fn=partial(_write, [writer.transforms]) if request.async_fn else None)


def _write(transforms: list, rank: int, buckets: Sequence[WriteBucket], results: queue.SimpleQueue) -> None:
    """Write a file for each bucket, synced to disk; puts into results what was written, or the exception."""
    del rank
    written = {}
    for index, bucket in enumerate(buckets):
        answers: Any = queue.SimpleQueue()
        unfinished: Any = queue.Queue()  # Megatron's writers count down in it
        unfinished.put(index)
        FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, answers, unfinished, use_fsync=True)
        _, written[index] = answers.get()
        if isinstance(written[index], Exception):
            results.put(written[index])
            return
    results.put(written)
