"""Call functions of the user at fixed moments of a run, on every rank with the same values."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from isoloss.engine.instruments import watchdog
from isoloss.parallel import UserError
from isoloss.parallel.collectives import gather_objects

Answer = bool | None
Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Callbacks:
    """Functions that a run calls: on every rank, with the values of rank 0, and with the number of steps done first.

    on_step_end: function of (step, metrics) after every optimizer step; metrics is the step's row of metrics.jsonl.
    on_evaluate: function of (step, metrics) after every evaluation; step is 0 before training.
    on_save: function of (step, folder) once a checkpoint is whole on the disk, for which training then waits.

    Where on_step_end or on_evaluate returns True on any rank, the run ends after that step, with an evaluation, a
    checkpoint and an export as after its last step. An exception in a function ends the run on all ranks, as a
    UserError that names the function, its file and its line; the exception itself is the error's `__cause__`.
    """

    on_step_end: Callable[[int, Numbers], Answer] | None = None
    on_evaluate: Callable[[int, Numbers], Answer] | None = None
    on_save: Callable[[int, Path], None] | None = None

    def __post_init__(self):
        for name, function in vars(self).items():
            if function is not None and not callable(function):
                raise UserError(f"{name}={function!r} must be a function, such as lambda step, metrics: ...")

    def call(self, name: str, group: dist.ProcessGroup, step: int, value: Any) -> bool:
        """Call the function `name`, if there is one, and return whether a rank asks for the end of the run.

        value: its second argument; that of rank 0 counts.
        group: all ranks of the world, on the host. A broadcast and an all-gather over it where there is a function.
        Raises UserError on every rank.
        """
        function = getattr(self, name)
        if function is None:
            return False
        shared = [value]
        dist.broadcast_object_list(shared, src=0, group=group)
        answer, failure = None, None
        try:
            with watchdog.patient():
                answer = function(step, shared[0])
        except Exception as error:
            failure = error
        problem = f"{name} failed after step {step}: {_reason(failure)}" if failure else _refusal(name, answer)
        answers = gather_objects((problem, bool(answer)), group)
        for rank, (problem, _) in enumerate(answers):
            if problem:
                raise UserError(problem if rank == dist.get_rank() else f"{problem}, on rank {rank}") from failure
        return any(stop for _, stop in answers)


NO_CALLBACKS = Callbacks()


def _refusal(name: str, answer: object) -> str:
    """Return what is wrong with an answer; "" if nothing is."""
    if answer is None or (isinstance(answer, bool | np.bool_) and name != "on_save"):
        return ""
    returns = "nothing" if name == "on_save" else "True to end the run, else False or nothing"
    return f"{name} returned {answer!r}: return {returns}"


def _reason(error: BaseException) -> str:
    """Return the type and text of an exception on one line, with the line of code that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return " ".join(f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})".split())
