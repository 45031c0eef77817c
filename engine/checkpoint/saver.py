"""Write checkpoints to the disk while training goes on."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch.distributed as dist

from isoloss.engine.checkpoint.checkpoint import NotWrittenError, Staged, prune
from isoloss.engine.checkpoint.writer import HostCopies
from isoloss.engine.config.schema import CheckpointConfig
from isoloss.parallel.rank0 import is_main
from isoloss.parallel.runtime.console import say
from isoloss.parallel.runtime.process_group import host_group

NICE = 10  # niceness that writing threads add to that of training


class Saver:
    """Writes the checkpoints of a run in order, in a thread of each rank.

    Every rank calls every method, and all see the same checkpoints fail. The constructor is collective over the world.

    A checkpoint that could not be written is reported, and the next one is tried: a disk may be full, or a file server
    away, for a while. The second failure in a row ends the run, which would train in vain.
    """

    def __init__(self, config: CheckpointConfig):
        # A gloo group for the threads: their collectives neither wait for those of training nor mix with them.
        self._group, self._keep = host_group(), config.keep
        self._thread = ThreadPoolExecutor(1, "checkpoint", _give_way)
        self._copies = HostCopies() if config.asynchronous else None
        self._pending: Future[NotWrittenError | None] | None = None
        self._problem: NotWrittenError | None = None  # the newest checkpoint's

    def save(self, *stages: Callable[[HostCopies | None], Staged]) -> None:
        """Wait for checkpoints in flight, copy these to host memory, and start to write them in this order.

        When all are written, the oldest of each kind are deleted. Without checkpoint.asynchronous, wait for that.
        Raises like `wait`.
        """
        self.wait()
        if self._copies is not None:
            self._copies.release()
        staged: list[Staged] = []
        try:
            for stage in stages:
                staged.append(stage(self._copies))
        except NotWrittenError as problem:
            self._note(_given_up(staged, problem))
            return
        self._pending = self._thread.submit(self._write, staged)
        if self._copies is None:
            self.wait()

    def wait(self, *, last: bool = False) -> None:
        """Wait until no checkpoint is in flight.

        last: whether no other checkpoint follows.
        Raises NotWrittenError on every rank for a second failure in a row, and with `last` for any.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._note(pending.result())
        if last and self._problem is not None:
            raise self._problem

    def close(self) -> None:
        """Wait for the checkpoint in flight, whether or not it fails."""
        self._thread.shutdown()
        dist.destroy_process_group(self._group)
        del self._group  # ends its threads

    def _note(self, problem: NotWrittenError | None) -> None:
        before, self._problem = self._problem, problem
        if before is not None and problem is not None:
            raise problem

    def _write(self, staged: Sequence[Staged]) -> NotWrittenError | None:
        try:
            for checkpoint in staged:
                checkpoint.write(self._group)
        except NotWrittenError as problem:
            return _given_up(staged, problem)
        try:
            for checkpoint in staged if is_main() else ():  # only after all are complete
                prune(checkpoint.folder, self._keep)
        except OSError as problem:  # the next save tries again
            say(f"isoloss: an old checkpoint could not be deleted: {problem}", error=True)
        return None


def _give_way() -> None:
    """Lower the priority of this thread below training's. Linux has a niceness for each thread."""
    thread = threading.get_native_id()
    with suppress(OSError):  # on other systems no process has this id
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)


def _given_up(staged: Sequence[Staged], problem: NotWrittenError) -> NotWrittenError:
    """Delete partial folders and report the error; return it."""
    for checkpoint in staged:
        checkpoint.discard()
    if is_main():  # reported here, as the main thread sees the error at its next save only
        say(f"isoloss: {problem}", error=True)
    return problem
