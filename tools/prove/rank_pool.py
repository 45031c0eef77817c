"""A pool of ranks on this machine: many layouts, one start-up. `prove` and the test suite run on it.

Importing Megatron costs seconds a process; re-creating a process group costs tenths. So the workers stay, and each
`run` forms a fresh world of as many of them as the layout needs.
"""

import contextlib
import functools
import gc
import multiprocessing
import os
import tempfile
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


class WorkerError(RuntimeError):
    """A rank failed; the message is its traceback. The pool has been restarted."""


@dataclass(frozen=True)
class RankWorker:
    """lifeline: our end of the pipe with which it ends (`isoloss.parallel.runtime.processes`)."""

    process: Any
    connection: Connection
    lifeline: Connection


class WorkerPool:
    """`size` worker processes; rank i of every world is worker i. Use as a context manager."""

    def __init__(self, size: int, timeout: timedelta = timedelta(minutes=5)):
        self.size = size
        self.timeout = timeout
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
        """function(*args) on ranks 0..world-1 of a fresh world; returns their results in rank order.

        function: importable by name; it may create a Mesh and an Engine.
        Raises UserError if a rank did, WorkerError for anything else (the other ranks, which may hang in a collective,
        are killed and replaced).
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
                connection.send((rank, world, str(Path(folder) / "store"), self.timeout, function, args))
            try:
                while len(results) < world:
                    for ready in wait([c for c in connections if c not in results]):
                        assert isinstance(ready, Connection)
                        results[ready] = self._receive(ready)
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
    """Both ends of one pipe, which stay open for as long as this process lives, as its fork server does.

    Not a pipe a worker: what a worker started may outlive it and hold its end, and closing ours would then kill the
    fork server that other workers are started from.
    """
    return multiprocessing.Pipe(duplex=False)


def _worn_out(process: Any) -> bool:
    return not process.is_alive() or psutil.Process(process.pid).num_threads() > MAX_THREADS


def _serve(connection: Connection, lifeline: Connection, lifeline_of_server: Connection, index: int) -> None:
    """A worker's life: join a world, run, leave it, until the owner of the pool hangs up. It ends with that owner, also
    within a collective, and so does the fork server, which else takes its time to leave Python."""
    processes.tie(lifeline_of_server.fileno(), os.getppid())
    processes.tie(lifeline.fileno(), os.getpid())
    if lifeline.poll():  # the owner ended before
        return
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(index)
    collect_garbage()
    while True:
        try:
            rank, world, store, timeout, function, args = connection.recv()
        except EOFError:
            return
        try:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(
                backend, store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout
            )
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
