"""What the ranks of the recipe's tests run."""

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from isoloss.engine.batching.sample import Sample
from isoloss.engine.checkpoint import checkpoint
from isoloss.engine.config.schema import BatchConfig, Config, LossConfig, ModelConfig, OptimConfig, TrainConfig
from isoloss.engine.run import run
from isoloss.engine.run.folder import open_folder
from isoloss.engine.sft import loop
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import Loss, cross_entropy, negative_log_likelihood
from isoloss.parallel import Layout, PreemptedError, UserError
from isoloss.tools.prove.parity import thaw
from isoloss.tools.prove.proof import on_layout

Arrays = dict[str, np.ndarray]


class Killed(Exception):
    """Stands for the end of a process."""


def weights(engine: Engine) -> Arrays:
    """The weights of this rank's stage, whole. fp64 holds every bit of the others, and numpy has no bf16."""
    return {name: weight.double().numpy(force=True).copy() for name, weight in engine.weights()}


def samples() -> list[Sample]:
    rng = np.random.default_rng(2)
    found = []
    for length in (7, 19, 4, 33, 12, 25, 9, 16):
        mask = torch.from_numpy(rng.random(length) < 0.7)
        mask[0], mask[1] = False, True
        found.append(Sample(torch.from_numpy(rng.integers(0, 2048, length)), mask))
    return found


def config_of(inputs, layout: str, precision: str = "fp32", **parallel) -> Config:
    config = Config(
        ModelConfig(path=f"{inputs}/model", from_scratch=True),
        batch=BatchConfig(max_tokens=48),
        optim=OptimConfig(lr=1e-3),
        train=TrainConfig(precision=precision),
    )
    config = on_layout(config, Layout.parse(layout), precision)
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **parallel))


def size(layout: str) -> int:
    return Layout.parse(layout).world_size


def train(
    config: Config, killed_after: int | None = None, killed_in_save: int | None = None, told_after: int | None = None
) -> Arrays:
    """The recipe; its weights at the end. Or killed after that step, or while that step's checkpoint is written; or its
    last rank is told to end in that step."""
    kept: Arrays = {}
    finish, check, write = run.Run.finish, run.BadStepGuard.check, checkpoint.Share.write

    def keep_weights(self):
        kept.update(weights(self._engine))
        return finish(self)

    def check_or_die(self, step, *rest):
        if step == killed_after:
            raise Killed
        if step == told_after and dist.get_rank() == dist.get_world_size() - 1:
            signal.raise_signal(signal.SIGTERM)
        check(self, step, *rest)

    def write_or_die(share):
        written = write(share)
        if f"{killed_in_save:08d}" in str(share._folder) if killed_in_save else False:
            raise Killed
        return written

    with (
        mock.patch.object(run.Run, "finish", keep_weights),
        mock.patch.object(run.BadStepGuard, "check", check_or_die),
        mock.patch.object(checkpoint.Share, "write", write_or_die),
    ):
        try:
            loop.train_sft(config, "test")
            died = False
        except (Killed, PreemptedError):
            died = True
    assert died == bool(killed_after or killed_in_save or told_after)
    return kept


def train_and_list(config: Config, **accident: int) -> list[list[str]]:
    """`train`, and for each of its optimizer steps the ids of the samples."""
    steps: list[list[str]] = []
    step = Engine.train_step

    def listing(self, samples, *rest):
        steps.append([sample.id for sample in samples])
        return step(self, samples, *rest)

    with mock.patch.object(Engine, "train_step", listing):
        train(config, **accident)
    return steps


def train_at(config: Config, peak: float) -> None:
    """The recipe, on devices that are said to have so many FLOPs a second."""
    with mock.patch.object(run, "peak_flops", lambda device: peak):
        loop.train_sft(config, "test")


def untrained(config: Config) -> Arrays:
    return weights(Engine(config))


def at_once(config: Config, folder: str) -> tuple[str, str]:
    """Two runs in the working folder `folder`, the second begins while the first has written no metrics yet: the folder
    of each, or what its user is told."""
    with contextlib.chdir(folder), open_folder(config, "test") as first:
        try:
            with open_folder(config, "test") as second:
                return str(first), str(second)
        except UserError as error:
            return str(first), str(error)


def steps(config: Config, frozen: bytes, count: int) -> tuple[list[float], list[float], Arrays]:
    """Losses and gradient norms of optimizer steps on the same samples, and the weights after them."""
    engine, samples = Engine(config), thaw(frozen)
    done = [engine.train_step(samples, cross_entropy(LossConfig())) for _ in range(count)]
    return [metrics.loss for metrics, _ in done], [result.grad_norm for _, result in done], weights(engine)


def spoiled_step(config: Config, frozen: bytes, spoil: str) -> dict[str, object]:
    """A step with a good one before and after it, and what became of the weights in it.

    spoil: "masks" takes every target away; "loss" makes every loss a NaN.
    """
    engine, samples = Engine(config), thaw(frozen)
    good = cross_entropy(LossConfig())
    bad = Loss.of(nan_loss) if spoil == "loss" else good
    empty = [type(sample)(sample.tokens_T, torch.zeros_like(sample.mask_T)) for sample in samples]
    before_any = weights(engine)
    engine.train_step(samples, good)
    before = weights(engine)
    metrics, result = engine.train_step(empty if spoil == "masks" else samples, bad)
    after = weights(engine)
    next_metrics, next_result = engine.train_step(samples, good)
    return {
        "loss": metrics.loss,
        "valid_tokens": metrics.valid_tokens,
        "grad_norm": result.grad_norm,
        "applied": result.applied,
        "unchanged": same(before, after),
        "moved": not same(before_any, before) and not same(after, weights(engine)),
        "next": (next_metrics.loss, next_result.grad_norm, next_result.applied),
    }


def gradients(config: Config, frozen: bytes, calls: Sequence[Sequence[int]]) -> tuple[float, Arrays]:
    """Gradient norm and gradients of one optimizer step, over several forward_backward calls on those samples."""
    engine, samples = Engine(config), thaw(frozen)
    for indices in calls:
        engine.forward_backward([samples[i] for i in indices], cross_entropy(LossConfig("sum")))
    found = {name: gradient.numpy(force=True).copy() for name, gradient in engine.gradients()}
    return engine.optim_step().grad_norm, found


def between_steps(config: Config, frozen: bytes, calls: Sequence[Sequence[int]]) -> tuple[list[float], Arrays]:
    """Gradient norms of three steps, and gradients of the one in the middle, which is taken in several calls."""
    engine, samples = Engine(config), thaw(frozen)
    loss = cross_entropy(LossConfig("sum"))
    first = engine.train_step(samples, loss)[1].grad_norm
    for indices in calls:
        engine.forward_backward([samples[i] for i in indices], loss)
    found = {name: gradient.numpy(force=True).copy() for name, gradient in engine.gradients()}
    middle = engine.optim_step().grad_norm
    return [first, middle, engine.train_step(samples, loss)[1].grad_norm], found


def failed_reduction(config: Config, frozen: bytes) -> tuple[float, float]:
    """The gradient norm of a step without learning, and of the same step after one that ended in its backward, when
    ranks had begun to exchange."""
    engine, samples = Engine(config), thaw(frozen)
    loss = cross_entropy(LossConfig())
    engine.train_step(samples, loss, 0.0)
    before = engine.train_step(samples, loss, 0.0)[1].grad_norm
    with mock.patch.object(engine, "optim_step", side_effect=Killed), contextlib.suppress(Killed):
        engine.train_step(samples, loss, 0.0)
    return before, engine.train_step(samples, loss, 0.0)[1].grad_norm


def misused_calls(config: Config, frozen: bytes) -> dict[str, str]:
    """What an engine answers to calls of forward_backward that would train on a wrong gradient; "" where it runs."""
    engine, samples = Engine(config), thaw(frozen)
    mean, summed = (cross_entropy(LossConfig(mode)) for mode in ("token-mean", "sum"))
    mixed = Loss((*summed.terms, dataclasses.replace(mean.terms[0], name="mean", coefficient=0.5)))

    def told(loss: Loss) -> str:
        try:
            engine.forward_backward(samples, loss)
        except ValueError as error:
            return str(error)
        return ""

    answers = {"first": told(summed), "second": told(summed)}
    engine.reduce_gradients()
    answers["after reduce_gradients"] = told(summed)
    engine.zero_grad()
    answers["after zero_grad"] = told(summed)
    for _ in engine.gradients():
        pass
    answers["after gradients"] = told(summed)
    engine.optim_step()
    for name, (first, second) in {
        "sum, then mean": (summed, mean),
        "mean, then sum": (mean, summed),
        "mean, then mean": (mean, mean),
        "sum, then sum and mean": (summed, mixed),
    }.items():
        assert told(first) == ""
        answers[name] = told(second)
        engine.optim_step()
    return answers


def first_step(config: Config, folder: str | None) -> list[float]:
    """Gradient norms of three optimizer steps, with Engine.save and Engine.load before them if there is a folder."""
    engine = Engine(config)
    if folder:
        engine.save(folder, {"step": 0})
        assert engine.load(folder) == {"step": 0}
    tokens = torch.arange(1, 40)
    samples = [Sample(tokens[:n], tokens[:n] > 1) for n in (9, 39, 20, 5)]
    return [engine.train_step(samples, cross_entropy(LossConfig()))[1].grad_norm for _ in range(3)]


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def merged(run: Sequence[Arrays]) -> Arrays:
    """Arrays of all stages; ranks that hold the same ones must agree."""
    everything: Arrays = {}
    for found in run:
        assert all(np.array_equal(everything[name], found[name]) for name in everything.keys() & found.keys())
        everything |= found
    return everything


nan_loss: Callable = lambda inputs: negative_log_likelihood(inputs) * float("nan")
