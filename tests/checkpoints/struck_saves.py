"""Saves of a model and its critic, with a fault at one operation on the disk."""

import os
import shutil
from functools import partial
from pathlib import Path

from support.faults.faults import Dead, Operations
from support.models.transformers_parity import make_engine

from isoloss.engine.checkpoint import checkpoint
from isoloss.engine.checkpoint.saver import Saver
from isoloss.engine.config.schema import CheckpointConfig
from isoloss.engine.step.engine import Engine
from isoloss.models.weights import manifest


class Job:
    """Saves a model and its critic: step 1, of which every `strike` has a copy, and step 2 with a fault."""

    def __init__(self, model: Path, folder: Path, *, asynchronous: bool):
        self.folder, self.now = folder, folder / "whole"
        self.policy = make_engine(model, "fp32", from_scratch=True)
        self.critic = Engine(self.policy.config, self.policy.source, critic_of=self.policy)
        self.saver = Saver(CheckpointConfig(keep=1, asynchronous=asynchronous))
        self.save(1)
        shutil.copytree(self.now, folder / "first")

    def save(self, step: int) -> None:
        of = lambda kind: self.now / kind / checkpoint.STEP_FOLDER.format(step)
        of_policy = partial(self.policy.stage, of("policy"), {"step": step})
        self.saver.save(partial(self.critic.stage, of("critic"), None), of_policy)
        self.saver.wait(last=True)

    def strike(self, at: int | None, fault: str | int = "dead") -> tuple[str, int]:
        """How it ended ("done", "dead", or the text of its exception), and the number of operations."""
        self.now = self.folder / f"at {at}"
        shutil.copytree(self.folder / "first", self.now)
        with Operations(at, fault) as operations:
            try:
                self.save(2)
                ended = "done"
            except (Dead, RuntimeError):  # torch tells Dead as an error of its own
                assert fault == "dead"
                ended = "dead"
            except checkpoint.NotWrittenError as problem:
                ended = str(problem)
        self.saver._problem = None
        return ended, operations.count

    def newest(self) -> tuple[int, int]:
        """The newest checkpoint of policy and critic; they then go. All files hold what was written, also those of the
        critic's from which the run goes on: of the policy's step."""
        policy, critic = (checkpoint.newest_first(self.now / kind)[0] for kind in ("policy", "critic"))
        for folder in (policy, critic, critic.with_name(policy.name)):
            manifest.check_checksums(folder, manifest.read(folder))
        shutil.rmtree(self.now)
        return int(policy.name.removeprefix("step_")), int(critic.name.removeprefix("step_"))


def saved_until(model: Path, folder: Path, at: int | None) -> tuple[str, int]:
    """Step 1 is saved; SIGKILL at the operation `at` of the save of step 2. Only where none was struck it returns.

    A task of a pool of its own: what is forked from a process with threads may find their locks taken for ever.
    """
    os.setpgid(0, 0)  # what is killed
    job = Job(model, folder, asynchronous=True)
    with Operations(at, "kill") as operations:
        job.save(2)
    return "done", operations.count
