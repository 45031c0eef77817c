"""Commands and whole torchrun jobs as forks of an interpreter that has imported torch, transformers and Megatron-Core:
seven CPU seconds less a process. `Popen` and `run` are those of `subprocess`, for `[sys.executable, "-m", ...]` and
`[sys.executable, FILE, ...]`.

A fork has the arguments, environment, folder, standard streams and session that it was asked for, runs its program as
`__main__`, and leaves Python as any process does. What it does not have is the import itself: variables that are read
by imports, what imports print, and other packages of the same names on PYTHONPATH. A test of these, of the environment
or command line that the system shows for a process, or of an agent that its ranks signal, starts a real one.

torchrun runs as it is, but for how it starts a rank: by a request to a fork of the process that became torchrun, made
before that had threads.
"""

import contextlib
import functools
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
LAUNCHER = "torch.distributed.run"
PRELOAD = (
    LAUNCHER,
    "isoloss.engine.rl.loop",
    "isoloss.engine.sft.loop",
    "isoloss.models.conversion.hf_to_mcore",
    "isoloss.recipes.launch",
)


@dataclass(frozen=True)
class Request:
    """command: what follows the interpreter. group: as `process_group` of Popen."""

    command: list[str]
    folder: str
    environment: dict[str, str]
    session: bool
    group: int


# ---- the side that asks ---------------------------------------------------------------------------------------------


class Popen(subprocess.Popen):
    """server: whom to ask; this process's own unless told otherwise."""

    def __init__(self, args: Any, *, server: socket.socket | None = None, **options: Any):
        self._server = server or start_server()
        super().__init__(args, **options)

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
        start_new_session, process_group,
    ):  # fmt: skip
        interpreter, *command = map(os.fspath, args)
        assert interpreter == sys.executable and not (preexec_fn or pass_fds or shell), args
        request = Request(
            command,
            os.path.abspath(cwd or "."),
            dict(os.environ if env is None else env),
            start_new_session,
            process_group,
        )
        self._status, theirs = socket.socketpair()
        streams = [given if given != -1 else usual for usual, given in enumerate((p2cread, c2pwrite, errwrite))]
        with theirs:
            socket.send_fds(self._server, [json.dumps(vars(request)).encode()], [*streams, theirs.fileno()])
        pipes = p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        self._close_pipe_fds(*pipes)  # pyright: ignore[reportAttributeAccessIssue]
        self._lines = self._status.makefile()
        self.pid = self._told()
        self._child_created = True

    def _told(self) -> int:
        line = self._lines.readline()
        if not line:
            raise RuntimeError("the interpreter from which commands are forked has ended")
        return int(line)

    def _internal_poll(self, _deadstate=None):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout):
        if self.returncode is None:
            # Not select, which takes no descriptor above 1023: gloo leaves open those of every group of a process.
            if not wait([self._status], timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._told()
            self._status.close()
        return self.returncode


def run(args: Any, *, timeout: float | None = None, check: bool = False, **options: Any) -> subprocess.CompletedProcess:
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


@functools.cache
def start_server() -> socket.socket:
    """The end of this process. With that, or with this process, the server ends."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        subprocess.Popen(
            [sys.executable, "-m", "support.runs.warm", str(there.fileno())],
            env=os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    return here


# ---- the side that forks --------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> Request | None:
    """Fork for every request. Returns in such a fork, with its request, and None once nobody can ask any more."""
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        asked: list[socket.socket | int] = [connection, *running]
        for ready in select.select(asked, [], [])[0]:
            if isinstance(ready, int):
                pid, status = running.pop(ready)
                os.close(ready)
                with status, contextlib.suppress(BrokenPipeError):
                    status.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                continue
            message, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 4)
            if not message:
                return None
            *streams, last = descriptors
            status = socket.socket(fileno=last)
            pid = os.fork()
            if pid:
                running[os.pidfd_open(pid)] = pid, status
                for stream in streams:
                    os.close(stream)
                continue
            connection.close()
            for pidfd, (_, other) in running.items():
                os.close(pidfd)
                other.close()
            request = Request(**json.loads(message))
            _take(request, streams)
            with status:
                status.sendall(b"%d\n" % os.getpid())
            return request


def _take(request: Request, streams: list[int]) -> None:
    """Everything of a process but its program."""
    if request.session:
        os.setsid()
    if request.group != -1:
        os.setpgid(0, request.group)
    moved = [os.dup(stream) for stream in streams]  # out of the way of 0, 1 and 2
    for number, stream in enumerate(moved):
        os.dup2(stream, number)
    for stream in (*streams, *moved):
        os.close(stream)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None  # it may have been chosen by another TMPDIR


def become(request: Request, base: list[str]) -> None:
    """Run the module or file of a request as `python` would. base: the part of sys.path that no variable adds to."""
    command = list(request.command)
    if command[0] == "-u":
        del command[0]
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True)
    is_module = command[0] == "-m"
    program, *arguments = command[is_module:]
    assert not program.startswith("-"), command
    beside = request.folder if is_module else os.path.dirname(os.path.abspath(program))
    sys.path[:] = [beside, *filter(None, request.environment.get("PYTHONPATH", "").split(os.pathsep)), *base]
    sys.argv = [program, *arguments]
    importlib.import_module("numpy").random.seed()  # forks would have the same; Python's own starts anew by itself
    if is_module:
        sys.modules.pop(program, None)  # a program is another copy of its module, which is not imported
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def fork_for_ranks() -> Request | None:
    """In torchrun, before it runs: have it start its ranks as forks. Returns, in these, their requests."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        here.close()
        request = serve(there)
        if request is None:
            os._exit(0)
        return request
    there.close()
    handler = importlib.import_module("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler")
    handler.Popen = functools.partial(Popen, server=here)  # pyright: ignore[reportAttributeAccessIssue]
    return None


def main(descriptor: int) -> None:
    base = sys.path[2:]  # after the folder that it is started in, and PYTHONPATH
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in PRELOAD:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread, which no fork would have"
    gc.collect()
    gc.freeze()  # a collection in a fork would look at all of it, and copy it
    request = serve(socket.socket(fileno=descriptor))
    if request is not None and LAUNCHER in request.command[:3]:
        request = fork_for_ranks() or request
    if request is not None:
        become(request, base)


if __name__ == "__main__":
    main(int(sys.argv[1]))
