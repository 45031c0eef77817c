"""Helper processes that end when the process that started them, the owner, ends by any signal, with all their children.

Owner and helper share a pipe, the lifeline, to which neither writes. When the owner ends, the system closes its end of
the pipe and sends SIGKILL to the helper's process group. No code of the helper runs for this, so the helper cannot
prevent it; only a process that leaves the group survives.

PR_SET_PDEATHSIG does not suffice: it fires when the thread that started the helper ends, and spares the helper's
children.

This module needs the standard library alone.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

PR_SET_PDEATHSIG = 1  # of prctl


class Helper:
    """A command in a session of its own, without standard input, tied to this process by a lifeline.

    stdout: descriptor for the helper's output and errors; default: this process's standard error. Standard output may
        be a pipe to a program that reads results.
    options: options of subprocess.Popen.
    """

    def __init__(
        self, command: Sequence[str | os.PathLike], *, stdout: int = 2, pass_fds: Sequence[int] = (), **options: Any
    ):
        helper_end, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stdout,
                pass_fds=(*pass_fds, helper_end),
                start_new_session=True,  # a group of its own, which Ctrl-C does not reach: the owner handles Ctrl-C
                **options,
            )
            tie(helper_end, -self._process.pid)
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(helper_end)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def kill(self) -> int:
        """End the helper and its process group; return its exit status."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left of the group
            os.killpg(self.pid, signal.SIGKILL)
        status = self.wait()
        os.close(self._lifeline)
        return status


def tie(lifeline: int, whom: int) -> None:
    """Make the system kill `whom` when the other end of the pipe `lifeline` closes.

    whom: id of a process, or minus the id of a process group. One of its members must keep `lifeline` open.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, whom)
    if hasattr(fcntl, "F_SETSIG"):  # other systems send SIGIO, which also ends a process by default
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def end_with_parent() -> None:
    """Let the system kill this process when the one that started it ends; for a rank, whose launcher gives it a session
    of its own, which a lifeline of the launcher does not reach. Does nothing where the system is not Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:  # it has ended already
            os.kill(os.getpid(), signal.SIGKILL)
