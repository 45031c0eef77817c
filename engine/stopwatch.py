"""How long this rank's device works on something, without waiting for it."""

import time
from typing import Any

import torch


class Stopwatch:
    """From the constructor to `stop`, as the device sees it."""

    def __init__(self):
        self._on_gpu = torch.cuda.is_available()
        self._from = self._now()

    def stop(self) -> None:
        self._to = self._now()

    def seconds(self) -> float:
        """Once the device has come to where `stop` was called."""
        return self._from.elapsed_time(self._to) / 1000 if self._on_gpu else self._to - self._from

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
