"""What goes wrong without an error on one rank of a world, and what is said of it."""

import socket
import time
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from isoloss.engine.config.schema import Config, LossConfig
from isoloss.engine.run import run
from isoloss.engine.sft import loop
from isoloss.engine.step import forward_backward as step
from isoloss.engine.step.engine import Engine, Limits
from isoloss.engine.step.losses import cross_entropy
from isoloss.engine.step.replica_check import DivergedError, differing
from isoloss.parallel.runtime.process_group import host_group
from isoloss.tools.prove.parity import thaw


def flip_a_bit(engine: Engine, name: str, place: int = 0) -> None:
    """The lowest one of an element of the weight that ends so, on this rank."""
    (parameter,) = [each.parameter for each in engine.model.owned() if each.weight.name.endswith(name)]
    flat = parameter.data.view(-1).view(torch.int32)
    flat[place] ^= 1


def divergence(config: Config, frozen: bytes, victims: tuple[int, ...], name: str) -> tuple[int, str]:
    """Two steps, then a bit flips on each of these ranks. How many weights differed before it, and what is told."""
    engine, samples, group = Engine(config), thaw(frozen), host_group()
    for _ in range(2):
        engine.train_step(samples, cross_entropy(LossConfig()), 1e-2)
    before = len(differing(engine.model))
    if dist.get_rank() in victims:
        flip_a_bit(engine, name, place=dist.get_rank())
    try:
        engine.check_replicas(group, "after step 2")
        return before, ""
    except DivergedError as error:
        return before, str(error)


def train_with_a_flip(config: Config, at: int, victim: int) -> str:
    """The sft recipe; a bit of a rank's weights flips at the end of step `at`. How it ended."""
    check = run.BadStepGuard.check

    def check_and_flip(self, step, metrics, result, samples):
        check(self, step, metrics, result, samples)
        if step == at and dist.get_rank() == victim:
            flip_a_bit(engines[0], "final_layernorm.weight")

    engines: list[Engine] = []
    make = Engine.__init__

    def keep(self, *args, **options):
        make(self, *args, **options)
        engines.append(self)

    with mock.patch.object(run.BadStepGuard, "check", check_and_flip), mock.patch.object(Engine, "__init__", keep):
        try:
            loop.train_sft(config, "test")
            return "done"
        except DivergedError as error:
            return str(error)


def train_with_a_straggler(config: Config, victim: int | None, seconds: float) -> tuple[list[str], str]:
    """The sft recipe, in which a rank takes so much longer for every micro-batch. What was printed, and its host."""
    told: list[str] = []
    forward = step.forward_row

    def slowly(*args):
        time.sleep(seconds * (3 if dist.get_rank() == victim else 1))
        return forward(*args)

    def keep(self, lines):
        told.extend(lines)

    with mock.patch.object(step, "forward_row", slowly), mock.patch.object(run.Run, "print", keep):
        loop.train_sft(config, "test")
    return [line for line in told if "is slow" in line], socket.gethostname()


def limited(config: Config, frozen: bytes, limits: tuple[float, float]) -> tuple[bool, bool, float, float]:
    """A step with limits on loss and gradient norm: applied, whether the weights moved, loss, gradient norm."""
    engine, samples = Engine(config), thaw(frozen)
    before = {name: np.copy(weight.numpy(force=True)) for name, weight in engine.weights()}
    metrics, result = engine.train_step(samples, cross_entropy(LossConfig()), 1e-2, Limits(*limits))
    moved = any((before[name] != weight.numpy(force=True)).any() for name, weight in engine.weights())
    return result.applied, moved, metrics.loss, result.grad_norm
