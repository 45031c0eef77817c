"""A checkpoint is written while training goes on, and holds what was there when it was taken."""

import os
import pickle
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch
from support.models.families import VOCAB, write_folder
from support.models.transformers_parity import make_samples
from support.runs.saves import taken_then_trained

from isoloss.engine.checkpoint import checkpoint
from isoloss.engine.checkpoint.saver import Saver
from isoloss.engine.checkpoint.writer import HostCopies
from isoloss.engine.config.schema import CheckpointConfig
from isoloss.engine.run.run import BadStepGuard
from isoloss.models.weights import manifest
from isoloss.parallel import UserError
from isoloss.recipes import launch

LENGTHS = (2, 40, 17, 29)
KINDS = [("fp32", {}), ("fp32", {"distributed_optimizer": False}), ("bf16", {}), ("fp64", {})]


@pytest.mark.parametrize(("precision", "parallel"), KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_after_it_was_taken_does_not_change_it(ranks, precision, parallel, tmp_path, pool):
    """To the bit what a save that is waited for writes, of weights, moments and step count, with the `extra` of rank 0,
    as in the middle of a batch of RL, and without a warning that other ranks have another one."""
    model = write_folder("qwen3-moe", tmp_path / "model")
    samples = make_samples(LENGTHS, VOCAB)
    waited, apart = tmp_path / "waited", tmp_path / "apart"
    of_ranks = pool.run(ranks, taken_then_trained, model, waited, apart, samples, precision, parallel)
    assert of_ranks == [(True, [])] * ranks
    assert checkpoint.read_extra(waited)["experience"].tolist() == [7, 7, 7]
    files = manifest.read(waited).files
    assert manifest.read(apart).files.keys() == files.keys() and sum(".distcp" in name for name in files) >= ranks
    for name in files.keys() - {".metadata"}:  # which knows the name of its folder
        assert (apart / name).read_bytes() == (waited / name).read_bytes(), name
    of_apart, of_waited = (pickle.loads((each / ".metadata").read_bytes()) for each in (apart, waited))
    assert of_apart.storage_data == of_waited.storage_data
    assert of_apart.state_dict_metadata == of_waited.state_dict_metadata


@pytest.fixture
def slow_disk(monkeypatch):
    """Nothing is written before this event is set."""
    mended, write = threading.Event(), checkpoint.Share.write
    monkeypatch.setattr(checkpoint.Share, "write", lambda share: (mended.wait(60), write(share))[1])
    return mended


def test_training_goes_on_meanwhile_and_the_next_save_waits(slow_disk, arguments, monkeypatch):
    """Three steps with a save each: the second begins while nothing of the first save is there, the third not."""
    found, check = [], BadStepGuard.check

    def look(self, step, *rest):
        found.append(sorted(path.name for path in Path("out/checkpoints").iterdir()) if step > 1 else [])
        if step == 2:
            slow_disk.set()
        check(self, step, *rest)

    monkeypatch.setattr(BadStepGuard, "check", look)
    argv = [*arguments, "train.steps=3", "checkpoint.every=1"]
    assert launch.main("sft", argv) == 0
    assert found[1] == [".step_00000001.partial"] and "step_00000001" in found[2]
    assert sorted(path.name for path in Path("out/checkpoints").iterdir()) == ["step_00000002", "step_00000003"]


def test_without_it_every_step_waits(slow_disk, arguments, monkeypatch):
    found, check = [], BadStepGuard.check

    def look(self, step, *rest):
        found.append(sorted(path.name for path in Path("out/checkpoints").glob("*")))
        check(self, step, *rest)

    monkeypatch.setattr(BadStepGuard, "check", look)
    slow_disk.set()
    argv = [*arguments, "checkpoint.every=1", "checkpoint.asynchronous=false"]
    assert launch.main("sft", argv) == 0
    assert found == [[], ["step_00000001"]]


def test_a_copy_is_taken_where_the_last_save_had_one():
    """Beside each other within a save, of tensors of one shape too; in the same memory from save to save."""
    copies, rows = HostCopies(), torch.arange(6.0).view(2, 3)
    first = [copies.of(rows), copies.of(rows + 1), copies.of(rows.T), copies.of(rows.double())]
    assert [copy.tolist() for copy in first[:2]] == [rows.tolist(), (rows + 1).tolist()]
    assert first[2].is_contiguous() and torch.equal(first[2], rows.T) and first[3].dtype == torch.float64
    copies.release()
    again = [copies.of(rows + 2), copies.of(rows + 3), copies.of(rows.T), copies.of(rows.double())]
    assert {copy.data_ptr() for copy in again} == {copy.data_ptr() for copy in first}
    assert again[0].tolist() == (rows + 2).tolist() and again[1].tolist() == (rows + 3).tolist()
    assert copies.of(rows).data_ptr() not in {copy.data_ptr() for copy in first}


def test_a_run_keeps_its_copies(arguments, monkeypatch):
    """Where each save takes its tensors to; without checkpoint.asynchronous nowhere."""
    found, of, save = [], HostCopies.of, Saver.save

    def counted(copies, tensor):
        found[-1].append((copy := of(copies, tensor)).data_ptr())
        return copy

    monkeypatch.setattr(HostCopies, "of", counted)
    monkeypatch.setattr(Saver, "save", lambda saver, *stages: (found.append([]), save(saver, *stages))[1])
    argv = [*arguments, "train.steps=3", "checkpoint.every=1"]
    assert launch.main("sft", argv) == 0
    assert len(found) == 3 and len(set(found[0])) == len(found[0]) > 10
    assert set(found[0]) == set(found[1]) == set(found[2])
    found.clear()
    assert launch.main("sft", [*argv, "output_dir=waits", "checkpoint.asynchronous=false"]) == 0
    assert found == [[], [], []]


def test_what_is_written_when_a_run_ends_in_a_mistake_is_finished(arguments, monkeypatch, capsys):
    """Too many steps that are not finite, right after a save began."""
    monkeypatch.setattr(BadStepGuard, "check", _bad_at_2)
    assert launch.main("sft", [*arguments, "checkpoint.every=1"]) == 2
    assert "planted" in capsys.readouterr().err
    folder = Path("out/checkpoints/step_00000001")
    manifest.check_checksums(folder, manifest.read(folder))


def _bad_at_2(self, step, *rest):
    if step == 2:
        raise UserError("planted")


@pytest.mark.skipif(sys.platform != "linux", reason="a niceness of each thread")
def test_what_writes_gives_way_to_training(one_rank):
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    saver = Saver(CheckpointConfig())
    assert saver._thread.submit(niceness).result() == min(niceness() + 10, 19)
    saver.close()


def test_what_saves_leaves_no_threads(one_rank):
    """A process may train many times, and each group of gloo has threads."""
    threads = psutil.Process().num_threads()
    for _ in range(3):
        saver = Saver(CheckpointConfig())
        saver._thread.submit(int).result()
        assert psutil.Process().num_threads() > threads
        saver.close()
    assert psutil.Process().num_threads() == threads
