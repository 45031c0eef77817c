"""Helper processes end when the process that started them ends, by whatever signal, and so does all that they started.

Owner and helper share a pipe, the lifeline, to which nobody writes. When the owner is gone, however it went, the system
closes its end and sends SIGKILL to the helper's process group. No code of the helper runs for that, so nothing that it
does, blocks or ignores can prevent it; only what leaves the group is spared.

Not PR_SET_PDEATHSIG: that fires when the *thread* that started the helper ends, and spares the helper's children.

This module needs the standard library alone.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any


class Helper:
    """A command in a session of its own, without standard input, tied to this process by a lifeline.

    stdout: a descriptor; what it prints goes to our standard error unless told otherwise, never to standard output,
    which may be a pipe to a program that reads results. options: those of subprocess.Popen.
    """

    def __init__(
        self, command: Sequence[str | os.PathLike], *, stdout: int = 2, pass_fds: Sequence[int] = (), **options: Any
    ):
        theirs, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stdout,
                pass_fds=(*pass_fds, theirs),
                start_new_session=True,  # a group of its own, which Ctrl-C does not reach: the owner handles that
                **options,
            )
            tie(theirs, -self._process.pid)
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(theirs)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def kill(self) -> int:
        """End it and everything that it started; returns its exit status."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left of the group
            os.killpg(self.pid, signal.SIGKILL)
        status = self.wait()
        os.close(self._lifeline)
        return status


def tie(lifeline: int, whom: int) -> None:
    """Have the system kill `whom` when the other end of the pipe `lifeline` closes.

    whom: a process, or, negative, a process group. One of its members has to keep `lifeline` open.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, whom)
    if hasattr(fcntl, "F_SETSIG"):  # elsewhere the signal is SIGIO, whose default is to end a process as well
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
