"""Checkpoints go to the disk while training goes on."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch.distributed as dist

from isoloss.engine.checkpoint.checkpoint import NotWrittenError, Staged, prune
from isoloss.engine.checkpoint.writer import HostCopies
from isoloss.engine.config.schema import CheckpointConfig
from isoloss.engine.instruments.console import say
from isoloss.parallel.rank0 import is_main
from isoloss.parallel.runtime.process_group import host_group

NICE = 10  # by so much less than training the threads that write insist on a core


class Saver:
    """Writes the checkpoints of a run, one after the other: in a thread of each rank, with checkpoint.asynchronous.

    The threads meet in a gloo group of their own, so that they neither wait for training nor mix with its collectives.
    Every rank calls every method, and sees the same checkpoints fail. The constructor is collective over the world.

    A disk may be full, or a server of files away, for a while: one checkpoint that could not be written is told, and
    the next is tried. The second in a row ends the run, which would otherwise train for nothing.
    """

    def __init__(self, config: CheckpointConfig):
        self._group, self._keep = host_group(), config.keep
        self._thread = ThreadPoolExecutor(1, "checkpoint", _give_way)
        self._copies = HostCopies() if config.asynchronous else None
        self._pending: Future[NotWrittenError | None] | None = None
        self._problem: NotWrittenError | None = None  # of the newest

    def save(self, *stages: Callable[[HostCopies | None], Staged]) -> None:
        """Once nothing is being written, take these to host memory and begin to write them, in this order; then delete
        the oldest of each kind. Without checkpoint.asynchronous, wait for the end. Raises as `wait`."""
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
        """Until nothing is being written.

        last: no other checkpoint will be tried.
        Raises NotWrittenError, on every rank, for the second in a row that could not be written, or the last.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._note(pending.result())
        if last and self._problem is not None:
            raise self._problem

    def close(self) -> None:
        """Let what is being written come to its end, whatever that is."""
        self._thread.shutdown()
        dist.destroy_process_group(self._group)
        del self._group  # whose threads end with it

    def _note(self, problem: NotWrittenError | None) -> None:
        before, self._problem = self._problem, problem
        if before is not None and problem is not None:
            raise problem

    def _write(self, staged: Sequence[Staged]) -> NotWrittenError | None:
        try:
            for each in staged:
                each.write(self._group)
        except NotWrittenError as problem:
            return _given_up(staged, problem)
        try:
            for each in staged if is_main() else ():  # after all were written: until then older ones count
                prune(each.folder, self._keep)
        except OSError as problem:  # the next save tries again
            say(f"isoloss: an old checkpoint could not be deleted: {problem}", error=True)
        return None


def _give_way() -> None:
    """Have this thread take what training leaves of the cores. Linux has a niceness for each thread."""
    thread = threading.get_native_id()
    with suppress(OSError):  # elsewhere there is no such process
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)


def _given_up(staged: Sequence[Staged], problem: NotWrittenError) -> NotWrittenError:
    """The user hears of it at once, and not when the run comes to it."""
    for each in staged:
        each.discard()
    if is_main():
        say(f"isoloss: {problem}", error=True)
    return problem
