"""Kills and failing disks at every operation of a save: the checkpoint before it, or the new one, is whole."""

import errno
import gc
import math
import os
import sys
from functools import partial
from pathlib import Path

import pytest
from checkpoints.struck_saves import Job, saved_until
from support.faults.faults import DISK_BROKEN, DISK_FULL, FullDisk
from support.runs.runs import numbers

from isoloss.engine.checkpoint import checkpoint, writer
from isoloss.engine.run.run import Run
from isoloss.models.weights import manifest
from isoloss.recipes import launch
from isoloss.tools.prove.rank_pool import WorkerError, WorkerPool


@pytest.fixture
def job(one_rank, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)  # a dead process closes no file
    monkeypatch.setattr(gc, "collect", lambda: 0)  # a save's, which would take most of the time
    return lambda asynchronous: Job(inputs / "model", tmp_path, asynchronous=asynchronous)


@pytest.mark.parametrize(("asynchronous", "stride"), [(True, 1), (False, 7)])
def test_dead_at_any_operation_a_whole_checkpoint_is_the_newest(job, asynchronous, stride):
    """Every open, write, fsync, mkdir, rename and delete of a save of two models, and of the deletion of the old ones.
    The policy's newest is never newer than its critic's."""
    job = job(asynchronous)
    ended, operations = job.strike(None)
    assert ended == "done" and operations >= 200 and job.newest() == (2, 2)
    found = []
    for at in range(0, operations, stride):
        ended, _ = job.strike(at)
        found.append(job.newest())
        assert ended == "dead" and found[-1] in [(1, 1), (1, 2), (2, 2)], at
    assert set(found) == {(1, 1), (1, 2), (2, 2)} and found == sorted(found)


def test_killed_for_good(inputs, tmp_path):
    """The same with SIGKILL, at a few operations."""
    with WorkerPool(1) as pool:
        ((ended, operations),) = pool.run(1, saved_until, inputs / "model", tmp_path / "whole", None)
        assert ended == "done"
        found = []
        for at in range(20, operations, 40):
            with pytest.raises(WorkerError, match="a worker process died"):
                pool.run(1, saved_until, inputs / "model", tmp_path / str(at), at)
            folders = [checkpoint.newest_first(tmp_path / str(at) / "whole" / kind)[0] for kind in ("policy", "critic")]
            for folder in folders:
                manifest.check_checksums(folder, manifest.read(folder))
            found.append(tuple(int(folder.name.removeprefix("step_")) for folder in folders))
    assert set(found) == {(1, 1), (1, 2), (2, 2)}


@pytest.mark.parametrize(("fault", "stride"), [(DISK_FULL, 1), (DISK_BROKEN, 5), (errno.EROFS, 5)])
def test_a_disk_that_fails_at_any_operation_leaves_the_checkpoint_before(job, fault, stride):
    """In one line; what is half written goes. Only once the new ones are whole does a failure to delete the old ones
    not matter."""
    job = job(True)
    _, operations = job.strike(None)
    outcomes = []
    for at in range(0, operations, stride):
        ended, _ = job.strike(at, fault)
        left = [path.name for kind in ("policy", "critic") for path in (job.now / kind).glob(".*.partial")]
        policy, critic = job.newest()
        assert left == [] and 1 <= policy <= critic <= 2, at
        if ended != "done":
            assert ended.startswith(f"checkpoint {job.folder}/") and "\n" not in ended
            assert f"({os.strerror(fault)}, on rank 0): make room for it, or mend the disk" in ended
        outcomes.append((policy, ended == "done"))
    # Where the name of a new one cannot be synced it is there, but may not outlive a power cut: that is told as well.
    assert set(outcomes) >= {(1, False), (2, True)} and outcomes.count((2, False)) <= 2


def test_a_disk_that_fails_amid_a_tensor_is_named(job, monkeypatch):
    """torch, which is writing then, raises an error of its own. Blocks are larger than the tensors of a small model."""
    monkeypatch.setattr(writer, "_BLOCK", 256)
    job = job(True)
    _, operations = job.strike(None)
    ends = [job.strike(at, DISK_FULL)[0] for at in range(0, operations, operations // 16)]
    problems = [ended for ended in ends if ended != "done"]
    assert len(problems) >= 12 and all(f"({os.strerror(DISK_FULL)}, on rank 0)" in ended for ended in problems)


@pytest.mark.parametrize(("steps_that_fail", "status"), [((2,), 0), ((2, 4), 0), ((2, 3), 2), ((5,), 2)])
def test_one_checkpoint_that_fails_does_not_end_a_run(steps_that_fail, status, arguments, capsys, monkeypatch):
    """Each is told at once; the second in a row, or the last, ends the run, which goes on when the disk is mended."""
    write = checkpoint.Share.write

    def write_or_fail(share):
        if any(f"step_{step:08d}" in str(share._folder) for step in steps_that_fail):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(share)

    argv = [*arguments, "train.steps=5", "checkpoint.every=1", "checkpoint.keep=9", "optim.schedule=constant"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Share, "write", write_or_fail)
        assert launch.main("sft", argv) == status
    told = [line for line in capsys.readouterr().err.splitlines() if "No space left" in line]
    ends = [line for line in told if line.startswith("isoloss: error: ")]
    assert len(told) - len(ends) == len(steps_that_fail) and len(ends) == (status == 2)
    for step, line in zip(steps_that_fail, told):
        assert f"checkpoint out/checkpoints/step_{step:08d} could not be written (No space left on device" in line
    assert launch.main("sft", [*argv, "checkpoint.resume=true"]) == 0
    assert [row["step"] for row in numbers("out")] == [1, 2, 3, 4, 5]
    assert not list(Path("out/checkpoints").glob(".*"))


def test_rows_that_were_refused_are_there_before_the_next_checkpoint(arguments, monkeypatch):
    """Else a run that dies after it, and goes on from it, would lack them."""
    disk, log, write, found = FullDisk(monkeypatch), Run.log, checkpoint.Share.write, []

    def logged(run, *rest):
        disk.room = 0
        log(run, *rest)
        disk.room = math.inf

    def written(share):
        found.append([row["step"] for row in numbers("out")])
        return write(share)

    monkeypatch.setattr(Run, "log", logged)
    monkeypatch.setattr(checkpoint.Share, "write", written)
    keys = ["train.steps=3", "checkpoint.every=1", "checkpoint.export_hf=false"]
    assert launch.main("sft", [*arguments, *keys]) == 0
    assert found == [[1], [1, 2], [1, 2, 3]]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EPIPE])
def test_whatever_a_disk_refuses_at_the_start_is_one_line(number, arguments, capsys, monkeypatch):
    """And what was in the run's folder stays. Another error keeps its traceback."""
    assert launch.main("sft", arguments) == 0
    before = Path("out/config.yaml").read_text()
    write = Path.write_bytes

    def refuse(path, data):
        write(path, data[:10])
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    start = partial(launch.main, "sft", [*arguments, "checkpoint.resume=true", "train.steps=3"])
    capsys.readouterr()
    if number == errno.EPIPE:
        with pytest.raises(OSError):
            start()
    else:
        assert start() == 2
        told = capsys.readouterr().err.splitlines()
        assert told == [
            f"isoloss: error: out/config.yaml.new: {os.strerror(number)}; make room for it, or mend the disk"
        ]
    assert Path("out/config.yaml").read_text() == before


def test_a_folder_that_cannot_be_written_is_told(arguments, capsys, monkeypatch):
    """Where not even the first file can be made."""

    def refuse(folder):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checkpoint, "_make_anew", refuse)
    assert launch.main("sft", arguments) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if "Read-only file system" in line]
    assert len(told) == 2 and told[1].startswith("isoloss: error: checkpoint out/checkpoints/step_00000002 could not")
