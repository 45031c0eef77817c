"""The same state saved by Megatron's default strategy and by ours; what a save has on the disk, and when. Runs on every
rank."""

import os
from pathlib import Path
from unittest import mock

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from isoloss.engine import checkpoint
from isoloss.engine.checkpoint_writer import SaveInProcess
from support.transformers_parity import TOKEN_MEAN, make_engine, make_samples


def both_ways(model: Path, theirs: Path, ours: Path, vocab_size: int) -> None:
    """theirs, ours: empty folders."""
    engine = make_engine(model, "fp32", tp=2)
    engine.train_step(make_samples((2, 40, 17), vocab_size), TOKEN_MEAN)
    for folder, strategy in ((ours, SaveInProcess(engine.mesh.dp_context)), (theirs, None)):
        state = checkpoint._state(engine.model, engine.optimizer, {"step": 1}, is_loading=False)
        filesystem_async._results_queue = None
        dist_checkpointing.save(state, str(folder), strategy)
    filesystem_async._results_queue._manager.shutdown()


def operations(model: Path, folder: Path, vocab_size: int) -> list[tuple[str, str, int]]:
    """Every fsync and rename of this rank in Engine.save: ("fsync" or "rename", path, bytes that it had)."""
    engine = make_engine(model, "fp32", tp=2)
    engine.train_step(make_samples((2, 40, 17), vocab_size), TOKEN_MEAN)
    done, fsync, rename = [], os.fsync, os.rename

    def synced(file) -> None:
        fsync(file)
        descriptor = file if isinstance(file, int) else file.fileno()
        done.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))

    def renamed(source, target, **options) -> None:
        rename(source, target, **options)
        done.append(("rename", str(target), 0))

    with mock.patch.object(os, "fsync", synced), mock.patch.object(os, "rename", renamed):
        engine.save(folder)
    return done
