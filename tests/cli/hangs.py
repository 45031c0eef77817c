"""The sft recipe, one of whose ranks stops moving in its third step:

torchrun ... -m cli.hangs KIND RANK key=value ...
"""

import ctypes
import os
import signal
import sys
import time
from unittest import mock

import torch.distributed as dist

from isoloss.engine.step.engine import Engine
from isoloss.recipes import launch

FOR_EVER = 3600


def sleep() -> None:
    time.sleep(FOR_EVER)


def hold_the_interpreter() -> None:
    """In C, where no other thread of Python can run."""
    ctypes.PyDLL(None).sleep(FOR_EVER)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def meet_alone() -> None:
    """In a collective, of a group of the same ranks, that the others do not enter."""
    dist.barrier()


KINDS = {each.__name__: each for each in (sleep, hold_the_interpreter, stop, meet_alone)}


def main(kind: str, victim: str, *argv: str) -> int:
    step, steps = Engine.train_step, []

    def step_or_hang(self, *args, **options):
        steps.append(len(steps))
        if len(steps) == 3 and dist.get_rank() == int(victim):
            KINDS[kind]()
        return step(self, *args, **options)

    with mock.patch.object(Engine, "train_step", step_or_hang):
        return launch.main("sft", argv)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
