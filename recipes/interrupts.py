"""Handle Ctrl-C: the first one makes a training run finish its step and save, the second one ends the process at once.

A thread watches for signals: Python runs no handler while the main thread waits in C for a device or for other ranks,
so without the thread a run that hangs could not be ended. Imports no torch.
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

from isoloss.parallel.runtime import console, environment
from isoloss.parallel.runtime.console import say

STATUS = 130  # shells' status of a program that Ctrl-C ended
# Seconds in which a second SIGINT counts as the same one under torchrun: a launcher may send SIGINT to every process of
# a node, and torchrun's agent, which got one too, passes it on.
SAME_SECONDS = 1.0


@contextlib.contextmanager
def watched(*, last: bool = False) -> Iterator[None]:
    """Make Ctrl-C end this process with STATUS and one line. While training has its handler (`Preemption`), the second
    Ctrl-C does so. Nothing changes if SIGINT is ignored, as in the background of a script, or outside the main
    thread.

    last: whether the process only ends afterwards, which may take a second. Ctrl-C then ends it without a traceback.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)  # set_wakeup_fd demands it
    handler = signal.signal(signal.SIGINT, _left_to_the_thread)
    descriptor = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(receiver,), name="interrupts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGINT, (lambda *_: os._exit(STATUS)) if last else handler)
        sender.close()  # ends the thread
        thread.join()
        receiver.close()


def _left_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing. Python writes a signal to the thread's socket only if the signal has a handler."""


def _watch(signals: socket.socket) -> None:
    """Watch for signals until the sender is closed. signals: socket with a byte per signal, its number."""
    torchrun = environment.torchrun_agent() is not None
    first = None
    while byte := signals.recv(1):
        number, now = byte[0], time.monotonic()
        if first is None and number == signal.SIGINT:
            if signal.getsignal(signal.SIGINT) == _left_to_the_thread:
                _end("interrupted")
            first = now
            if torchrun:
                console.leave()
            limit = environment.variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or "30"
            within = f" (torchrun kills it after TORCH_ELASTIC_SHUTDOWN_TIMEOUT={limit} seconds)" if torchrun else ""
            _report(f"interrupted: finishing the step under way and saving{within}; Ctrl-C again ends at once")
        elif first is None and torchrun:  # whose agent prints a line about the signal, below the live part
            console.leave()
        elif first is not None and _again(number, now - first, torchrun):
            _end("interrupted twice: the steps since the newest checkpoint are lost")


def _again(number: int, seconds: float, torchrun: bool) -> bool:
    """Return whether a signal is a second Ctrl-C. seconds: time since the first SIGINT."""
    # torchrun's agent, whose handler left by an exception at the first Ctrl-C, passes the second one on as SIGTERM.
    if number == signal.SIGINT:
        return not torchrun or seconds > SAME_SECONDS
    return torchrun and number == signal.SIGTERM


def _end(why: str) -> None:
    """Report why, and end this process at once; its helpers end with it (`isoloss.parallel.runtime.processes`)."""
    console.leave()
    _report(why)
    os._exit(STATUS)


def _report(text: str) -> None:
    """Print a line, once per node."""
    # On a terminal an empty line comes first, as the cursor is behind "^C", which a live part would redraw.
    if environment.local_rank() == 0:
        say(*([""] if sys.stderr.isatty() and not console.is_live() else []), f"isoloss: {text}", error=True)
