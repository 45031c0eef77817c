"""Notice signals to end, so that a run saves first: SIGTERM, SIGUSR1 (Slurm, before the time limit), SIGINT
(Ctrl-C)."""

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Preemption:
    """Notes signals to end. group: all ranks of the world, on the host."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._received = 0
        self._before: dict[signal.Signals, Any] = {}

    def begin(self) -> None:
        """Install the handlers. Only a main thread can."""
        if threading.current_thread() is threading.main_thread():
            # A shell makes processes in the background of a script ignore SIGINT. They go on to ignore it.
            ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            numbers = [number for number in SIGNALS if number != signal.SIGINT or not ignored]
            self._before = {number: signal.signal(number, self._note) for number in numbers}

    def end(self) -> None:
        """Restore the handlers of before."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def received(self) -> signal.Signals | None:
        """Return the signal that any rank received, the same on every rank. One all-reduce over the world."""
        highest = torch.tensor(self._received)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self._group)
        return signal.Signals(int(highest)) if highest else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Note a signal. The second Ctrl-C runs the handler of before, which by default raises KeyboardInterrupt."""
        before = self._before[signal.Signals(number)]
        if number == signal.SIGINT and self._received and callable(before):
            before(number, frame)
        self._received = max(self._received, number)
