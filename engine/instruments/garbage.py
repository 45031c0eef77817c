"""When Python collects its garbage. Python itself would choose a moment of its own on every rank, and all wait for
the rank that is at it."""

import gc


class Garbage:
    """Collected after the steps that are multiples of `every`, on all ranks alike; 0: whenever Python likes.

    Between `begin` and `end`. What is there at the beginning, modules and the model above all, is never searched.
    """

    def __init__(self, every: int):
        self._every = every

    def begin(self) -> None:
        if self._every:
            gc.collect()
            gc.freeze()
            gc.disable()

    def after_step(self, step: int) -> None:
        if self._every and step % self._every == 0:
            gc.collect()

    def end(self) -> None:
        if self._every:
            gc.enable()
            gc.unfreeze()
