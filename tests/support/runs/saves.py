"""The same state saved by Megatron's default strategy and by ours; what a save has on the disk, and when. Runs on every
rank."""

import os
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import validation
from megatron.core.dist_checkpointing.strategies import filesystem_async

from isoloss.engine.batching.sample import Sample
from isoloss.engine.checkpoint import checkpoint
from isoloss.engine.checkpoint.writer import HostCopies, Share
from isoloss.parallel.collectives import gather_objects
from support.models.transformers_parity import TOKEN_MEAN, make_engine, make_samples


def both_ways(model: Path, theirs: Path, ours: Path, vocab_size: int) -> None:
    """theirs, ours: empty folders."""
    engine = make_engine(model, "fp32", tp=2)
    engine.train_step(make_samples((2, 40, 17), vocab_size), TOKEN_MEAN)
    state, extra = lambda: checkpoint._state(engine.model, engine.optimizer, is_loading=False), {"step": 1}
    share = Share(ours, state(), extra, engine.mesh.dp_context, HostCopies())
    written = gather_objects(share.write())
    if dist.get_rank() == 0:
        share.complete(written)
    filesystem_async._results_queue = None
    dist_checkpointing.save({**state(), "extra": extra}, str(theirs))
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


def taken_then_trained(
    model: Path, waited: Path, apart: Path, samples: list[Sample], precision: str, parallel: dict
) -> tuple[bool, list[str]]:
    """The same state saved, and taken apart but written after another step only, with an `extra` of each rank's own;
    whether that step changed a weight, and what Megatron warned of. In memory that has held another copy, of the
    weights before."""
    engine = make_engine(model, precision, **parallel)
    copies, extra = HostCopies(), {"step": 1, "experience": torch.full((3,), 7 + dist.get_rank())}
    engine.stage(apart.with_name("before"), {}, copies)
    copies.release()
    engine.train_step(samples, TOKEN_MEAN)
    before = {name: weight.clone() for name, weight in engine.weights()}
    with mock.patch.object(validation.logger, "warning") as warn:
        engine.save(waited, extra)
        staged = engine.stage(apart, extra, copies)
    engine.train_step(samples, TOKEN_MEAN)
    staged.write()
    moved = any(not torch.equal(before[name], weight) for name, weight in engine.weights())
    return moved, [str(call.args[0]) for call in warn.call_args_list]
