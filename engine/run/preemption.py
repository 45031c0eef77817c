"""A run that is told to end saves first: by SIGTERM, by SIGUSR1, which Slurm sends before the end of the time, or by
SIGINT, which is Ctrl-C."""

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Preemption:
    """Whether a rank of the world was told to end. group: of the world, on the host."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._received = 0
        self._before: dict[signal.Signals, Any] = {}

    def begin(self) -> None:
        """From now on the signals are noted. Elsewhere than in its main thread a process cannot be told. A shell has
        what runs in the background of a script ignore SIGINT, which stays so."""
        if threading.current_thread() is threading.main_thread():
            ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            noted = [each for each in SIGNALS if each != signal.SIGINT or not ignored]
            self._before = {each: signal.signal(each, self._note) for each in noted}

    def end(self) -> None:
        """From now on they do what they did before."""
        for each, before in self._before.items():
            signal.signal(each, before)

    def told(self) -> signal.Signals | None:
        """The signal that a rank got, the same on every rank: between two steps, so that all end after the same one.

        One all-reduce over the world.
        """
        highest = torch.tensor(self._received)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self._group)
        return signal.Signals(int(highest)) if highest else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The second Ctrl-C does what it did before: it raises KeyboardInterrupt, or what a program made of it."""
        before = self._before[signal.Signals(number)]
        if number == signal.SIGINT and self._received and callable(before):
            before(number, frame)
        self._received = max(self._received, number)
