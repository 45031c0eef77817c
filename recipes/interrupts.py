"""Ctrl-C: the first one has a run that trains finish its step and save, the next one ends the process at once.

A thread watches. The main thread runs no handler while it is in C, where it waits for a device or for other ranks: a
run that hangs could not be ended. Imports no torch.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from isoloss.engine.instruments.console import say
from isoloss.parallel.runtime import environment

STATUS = 130  # a shell's, for a program that Ctrl-C ended
# A launcher may send SIGINT to every process of a node, and torchrun's agent, which got one too, passes it on.
SAME_SECONDS = 1.0


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Ctrl-C ends this process with STATUS and one line, unless training has a handler of its own (`Preemption`): then
    the second one does. Where SIGINT is ignored, as in the background of a script, and in other threads than the main
    one, nothing changes."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)  # Python asks for it
    handler = signal.signal(signal.SIGINT, _left_to_the_thread)
    descriptor = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(ours,), name="interrupts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGINT, handler)
        theirs.close()  # which ends the thread
        thread.join()
        ours.close()


def _left_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Leave the signal to the thread: Python reports only signals that have a handler."""


def _watch(signals: socket.socket) -> None:
    """signals: a byte for each signal that came, until its other end is closed."""
    torchrun = environment.torchrun_agent() is not None
    first = None
    while byte := signals.recv(1):
        number, now = byte[0], time.monotonic()
        if first is None and number == signal.SIGINT:
            if signal.getsignal(signal.SIGINT) == _left_to_the_thread:
                _end("interrupted")
            first = now
            limit = environment.variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or "30"
            within = f" (torchrun kills it after TORCH_ELASTIC_SHUTDOWN_TIMEOUT={limit} seconds)" if torchrun else ""
            _tell(f"interrupted: finishing the step under way and saving{within}; Ctrl-C again ends at once")
        elif first is not None and _again(number, now - first, torchrun):
            _end("interrupted twice: the steps since the newest checkpoint are lost")


def _again(number: int, seconds: float, torchrun: bool) -> bool:
    """Return whether a signal, `seconds` after the first SIGINT, is another Ctrl-C. The agent of torchrun, which leaves
    its own handling of the first by an exception, passes the second on as SIGTERM."""
    if number == signal.SIGINT:
        return not torchrun or seconds > SAME_SECONDS
    return torchrun and number == signal.SIGTERM


def _end(why: str) -> None:
    """End this process, and with it the processes that it started (`isoloss.parallel.runtime.processes`)."""
    _tell(why)
    os._exit(STATUS)


def _tell(what: str) -> None:
    """Once a node. On a terminal below the progress bar, and the ^C behind it."""
    if environment.local_rank() == 0:
        say(*([""] if sys.stderr.isatty() else []), f"isoloss: {what}", error=True)
