"""A pool of ranks on this machine: many layouts, one start-up. `prove` and the test suite run on it.

Importing Megatron costs seconds a process; re-creating a process group costs tenths. So the workers stay, and each
`run` forms a fresh world of as many of them as the layout needs.
"""

import contextlib
import faulthandler
import functools
import gc
import math
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from isoloss.parallel import UserError, mesh
from isoloss.parallel.runtime import processes

# A worker with more threads is replaced: what a function leaves behind keeps its process groups, and every gloo group
# its threads.
MAX_THREADS = 64
# Everything that a worker would otherwise import for itself: the fork server imports it once.
PRELOAD = ["isoloss.engine.step.engine"]
# Interval of looks at ranks while they are silent, and the share of a processor that says that one of them works:
# ranks that wait for each other in gloo use a thousandth.
LOOKS = 10
WORKING = 0.01
DUMP = signal.SIGUSR2  # a rank writes where its threads are, also while it is in C


class WorkerError(RuntimeError):
    """A rank failed; the message is its traceback. The pool has been restarted."""


@dataclass(frozen=True)
class RankWorker:
    """A worker process. lifeline: the pool's end of the pipe that ends it (`isoloss.parallel.runtime.processes`)."""

    process: Any
    connection: Connection
    lifeline: Connection


class Silence:
    """A detector of ranks that hang: for a number of seconds none of the processes, nor any that they started, works.
    A computation may take any time.

    Looks are counted, not the clock: while a machine is stopped no process works.
    """

    def __init__(self, pids: list[int], seconds: float):
        self.until_next_look = seconds / (LOOKS + 1)  # work just after a look costs one more
        self._pids, self._working = pids, WORKING * seconds
        self._spent = [-math.inf] * len(pids)
        self._looks = 0

    def end(self) -> None:
        self._looks = 0

    def is_too_long(self) -> bool:
        """Look once more. Call it every `until_next_look` seconds."""
        spent = [_cpu_seconds(pid) for pid in self._pids]
        if any(abs(now - before) > self._working for now, before in zip(spent, self._spent)):
            self._spent, self._looks = spent, 0
        else:
            self._looks += 1
        return self._looks >= LOOKS


class WorkerPool:
    """`size` worker processes; rank i of every world is worker i. Use as a context manager."""

    def __init__(
        self,
        size: int,
        timeout: timedelta = timedelta(minutes=5),
        silence: float = 60.0,
        caller: Callable[[], str] = str,
    ):
        """Start no process yet.

        silence: seconds without an answer and without work, after which a world counts as hanging.
        caller: name of the caller, such as the running test, for the error of a world that hangs."""
        self.size = size
        self.timeout = timeout
        self.silence = silence
        self.caller = caller
        # A fork server cannot hold a CUDA context, so GPU ranks are spawned.
        on_gpu = torch.cuda.is_available()
        self._context = multiprocessing.get_context("spawn") if on_gpu else multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._workers: list[RankWorker] = []

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call function(*args) on ranks 0..world-1 of a fresh world, and return their results in rank order.

        function: importable by name; it may create a Mesh and an Engine.
        Raises UserError if a rank did, WorkerError for anything else (the other ranks, which may hang in a collective,
        are killed and replaced). That is also raised, with the stacks of all ranks, for a world that hangs.
        """
        if world > self.size:
            raise ValueError(f"a world of {world} ranks does not fit a pool of {self.size}")
        for index in range(world):
            if index == len(self._workers):
                self._workers.append(self._start_worker(index))
            elif _worn_out(self._workers[index].process):
                self._stop_worker(self._workers[index])
                self._workers[index] = self._start_worker(index)
        connections = [worker.connection for worker in self._workers[:world]]
        results: dict[Connection, Any] = {}
        with tempfile.TemporaryDirectory(prefix="isoloss-world-") as folder:
            for rank, connection in enumerate(connections):
                connection.send((rank, world, folder, self.timeout, function, args))
            silence = Silence([worker.process.pid for worker in self._workers[:world]], self.silence)
            try:
                while len(results) < world:
                    answered = wait([c for c in connections if c not in results], silence.until_next_look)
                    for ready in answered:
                        assert isinstance(ready, Connection)
                        results[ready] = self._receive(ready)
                    if answered:
                        silence.end()
                    elif silence.is_too_long():
                        what = f"{function.__module__}.{getattr(function, '__qualname__', function)}"
                        raise WorkerError(
                            f"{what} hangs: no rank answered or worked for {self.silence:.0f} seconds "
                            f"{self.caller()}\n{self._stacks(world, folder)}"
                        )
            except BaseException:  # Ctrl-C or a time limit as well: the ranks would still answer, to the next run
                self.close()
                raise
        return [results[connection] for connection in connections]

    def close(self) -> None:
        for worker in self._workers:
            self._stop_worker(worker)
        self._workers.clear()

    @staticmethod
    def _stop_worker(worker: RankWorker) -> None:
        worker.connection.close()
        worker.process.kill()
        worker.process.join()
        worker.lifeline.close()

    def _start_worker(self, index: int) -> RankWorker:
        here, there = self._context.Pipe()
        theirs, ours = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_serve, args=(there, theirs, _lifeline_of_server()[0], index))
        process.start()
        there.close()
        theirs.close()
        return RankWorker(process, here, ours)

    def _stacks(self, world: int, folder: str) -> str:
        """Return the stack of each rank. Ranks that do not write it within two seconds are stopped or gone."""
        for worker in self._workers[:world]:
            os.kill(worker.process.pid, DUMP)
        written, before = [""] * world, None
        for _ in range(20):
            time.sleep(0.1)
            files = [_stacks_file(folder, rank) for rank in range(world)]
            written = [file.read_text() if file.exists() else "" for file in files]
            if all(written) and written == before:
                break
            before = written
        stacks = [stack or "it is stopped or gone\n" for stack in written]
        return "\n".join(f"rank {rank} of {world}:\n{stack}" for rank, stack in enumerate(stacks))

    @staticmethod
    def _receive(connection: Connection) -> Any:
        try:
            status, value = connection.recv()
        except EOFError:
            status, value = "crash", "a worker process died"
        if status == "ok":
            return value
        raise UserError(value) if status == "mistake" else WorkerError(value)


@functools.cache
def _lifeline_of_server() -> tuple[Connection, Connection]:
    """Return both ends of one pipe, which stay open as long as this process and its fork server live.

    Not a pipe a worker: what a worker started may outlive it and hold its end, and closing ours would then kill the
    fork server that other workers are started from.
    """
    return multiprocessing.Pipe(duplex=False)


def _worn_out(process: Any) -> bool:
    return not process.is_alive() or psutil.Process(process.pid).num_threads() > MAX_THREADS


def _cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process and of all that it started."""
    spent = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):  # one that is gone is seen where its answer is read
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            spent += sum(member.cpu_times()[:4])
    return spent


def _stacks_file(folder: str, rank: int) -> Path:
    return Path(folder, f"stacks.{rank}")


def _serve(connection: Connection, lifeline: Connection, lifeline_of_server: Connection, index: int) -> None:
    """Run a worker: join a world, run, leave it, until the owner of the pool hangs up. The worker ends with that owner,
    also within a collective, and so does the fork server, which would be slow to leave Python."""
    processes.tie(lifeline_of_server.fileno(), os.getppid())
    processes.tie(lifeline.fileno(), os.getpid())
    if lifeline.poll():  # the owner has ended already
        return
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(index)
    collect_garbage()
    while True:
        try:
            rank, world, folder, timeout, function, args = connection.recv()
        except EOFError:
            return
        stacks = _stacks_file(folder, rank).open("w")
        faulthandler.register(DUMP, stacks)
        try:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            store = dist.FileStore(str(Path(folder) / "store"), world)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
            answer = ("ok", function(*args))
            dist.barrier()  # a rank that closes its connections early would break those that still connect
            mesh.destroy()
            dist.destroy_process_group()
            collect_garbage()
        except UserError as error:
            answer = ("mistake", str(error))
        except Exception:
            answer = ("crash", f"rank {rank} of {world}:\n{traceback.format_exc()}")
        with contextlib.suppress(BrokenPipeError):  # the parent may be gone
            connection.send(answer)


def collect_garbage() -> None:
    """Collect the engines of a world that was left, and leave what stays (imported modules: a million objects) out of
    later collections.

    Engines hold their groups in reference cycles, and every gloo group holds threads. That of Megatron's distributed
    optimizer goes through C++, where Python cannot collect it: each that was built since the last call is emptied.
    """
    for candidate in gc.get_objects():  # not those that earlier calls froze
        if type(candidate) is DistributedOptimizer:
            vars(candidate).clear()
    gc.collect()
    gc.freeze()
