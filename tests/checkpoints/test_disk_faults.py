"""Kills and failing disks at every operation of a save: the checkpoint before it, or the new one, is whole."""

import errno
import os
from pathlib import Path

import pytest
from support.faults import DISK_BROKEN, DISK_FULL, struck
from support.runs import numbers
from support.transformers_parity import make_engine

from isoloss.engine import checkpoint
from isoloss.engine.checkpoint_saver import Saver
from isoloss.engine.config import CheckpointConfig, Config
from isoloss.engine.engine import Engine
from isoloss.models.weights import manifest
from isoloss.recipes import launch, sft


class Job:
    """A process with an engine and its critic, which has saved step 1 of both, and saves step 2 with the fault."""

    def __init__(self, inputs: Path, folder: Path, *, asynchronous: bool):
        self.inputs, self.folder, self.asynchronous = inputs, folder, asynchronous

    def prepare(self) -> None:
        self.policy = make_engine(self.inputs / "model", "fp32", from_scratch=True)
        self.critic = Engine(self.policy.config, self.policy.source, critic_of=self.policy)
        self.saver = Saver(CheckpointConfig(keep=1, asynchronous=self.asynchronous))
        self.save(1)
        self.saver.wait(last=True)

    def save(self, step: int) -> None:
        of = lambda kind: self.folder / kind / checkpoint.STEP_FOLDER.format(step)
        stage = lambda: [self.critic.stage(of("critic")), self.policy.stage(of("policy"), {"step": step})]
        self.saver.save(stage)

    def strike(self, at: int | None, fault: str | int = "kill") -> tuple[str, int]:
        def work() -> None:
            self.save(2)
            self.saver.wait(last=True)

        return struck(work, at, fault, self.prepare)

    def newest(self, kind: str) -> int:
        """The newest checkpoint, all of whose files hold what was written."""
        folder = checkpoint.newest_first(self.folder / kind)[0]
        manifest.check_checksums(folder, manifest.read(folder))
        return int(folder.name.removeprefix("step_"))


@pytest.fixture
def job(inputs, tmp_path):
    return lambda name, **options: Job(inputs, tmp_path / name, **options)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_killed_at_any_operation_a_whole_checkpoint_is_the_newest(job, asynchronous):
    """Every open, write, fsync, mkdir, rename and delete of a save of two models, and of the deletion of the old ones.
    The policy's newest is never newer than its critic's."""
    ended, operations = job("whole", asynchronous=asynchronous).strike(None)
    assert ended == "done" and operations >= 100
    found = []
    for at in range(operations):
        one = job(str(at), asynchronous=asynchronous)
        ended, _ = one.strike(at)
        policy, critic = one.newest("policy"), one.newest("critic")
        assert ended == "killed" and 1 <= policy <= critic <= 2, at
        found.append((policy, critic))
    assert set(found) == {(1, 1), (1, 2), (2, 2)} and found == sorted(found)


@pytest.mark.parametrize("fault", [DISK_FULL, DISK_BROKEN, errno.EROFS])
def test_a_disk_that_fails_at_any_operation_leaves_the_checkpoint_before(job, fault):
    """In one line; what is half written goes. Only once the new ones are whole does a failure to delete the old ones
    not matter."""
    _, operations = job("whole", asynchronous=True).strike(None)
    outcomes = []
    for at in range(operations):
        one = job(str(at), asynchronous=True)
        ended, _ = one.strike(at, fault)
        policy, critic = one.newest("policy"), one.newest("critic")
        assert 1 <= policy <= critic <= 2
        if ended != "done":
            assert ended.startswith(f"checkpoint {one.folder}/") and "\n" not in ended
            assert f"({os.strerror(fault)}, on rank 0): make room for it, or mend the disk" in ended
        outcomes.append((policy, ended == "done"))
        left = [path.name for kind in ("policy", "critic") for path in (one.folder / kind).glob(".*.partial")]
        assert left == [], at
    assert (1, False) in outcomes and (2, True) in outcomes
    assert all(done for policy, done in outcomes if policy == 2), outcomes  # it is not told that it failed
    assert all(not done for policy, done in outcomes if policy == 1), outcomes


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
        assert launch.main("sft", Config, sft.run, argv) == status
    told = [line for line in capsys.readouterr().err.splitlines() if "No space left" in line]
    ends = [line for line in told if line.startswith("isoloss: error: ")]
    assert len(told) - len(ends) == len(steps_that_fail) and len(ends) == (status == 2)
    for step, line in zip(steps_that_fail, told):
        assert f"checkpoint out/checkpoints/step_{step:08d} could not be written (No space left on device" in line
    assert launch.main("sft", Config, sft.run, [*argv, "checkpoint.resume=true"]) == 0
    assert [row["step"] for row in numbers("out")] == [1, 2, 3, 4, 5]
    assert not list(Path("out/checkpoints").glob(".*"))


def test_a_folder_that_cannot_be_written_is_told(arguments, capsys, monkeypatch):
    """Where not even the first file can be made."""

    def refuse(folder):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checkpoint, "_make_anew", refuse)
    assert launch.main("sft", Config, sft.run, arguments) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if "Read-only file system" in line]
    assert len(told) == 2 and told[1].startswith("isoloss: error: checkpoint out/checkpoints/step_00000002 could not")
