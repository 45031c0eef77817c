"""A step of a row of the covering array, on the ranks of its layout and on one rank; runs on every rank."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch
from numerics import gathering
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import Config
from isoloss.engine.step.engine import Engine
from isoloss.models.architecture import Architecture
from isoloss.parallel.mesh import Mesh
from isoloss.tools.prove import parity
from isoloss.tools.prove.parity import Case, Measurement, thaw
from isoloss.tools.prove.routing import as_tensors, compare_choices, recorded
from support.ranks import grouped

STEPS = 2  # of the optimizer: weights that are gathered late are read by the second


@dataclass(frozen=True)
class Trial:
    """config: in fp64, where every gradient is compared. stepped: the same in fp32 where the optimizer is a setting.
    routed: whether the samples name experts of their tokens."""

    case: Case
    config: Config
    stepped: Config | None
    routed: bool = False


@dataclass(frozen=True)
class Found:
    """Of a trial on one rank of a world.

    moved: how far each weight came in fp32, and the difference from the reference's way: squared norms, by name.
    reruns: of steps for which a message between experts had no room; None without a bound.
    """

    step: Measurement
    reruns: int | None
    moved: dict[str, tuple[float, float]]


def measured(trials: Sequence[Trial], frozen: bytes, references: Sequence[str], write: bool = False) -> list[Found]:
    """references: two files for each trial begin with that path; they are read, or (write, one rank) written."""
    with one_mesh():
        return [_measured(trial, frozen, reference, write) for trial, reference in zip(trials, references, strict=True)]


def with_routes(samples: Sequence[Sample], arch: Architecture) -> list[Sample]:
    """The samples with random routes. Samples of a prompt have the same ones on the tokens that they begin with alike,
    but those of the second prompt on the first of these alone, as from two servers. Some rows are missing, the last
    of each sample and all of the last sample."""
    assert arch.experts is not None
    rng, found = np.random.default_rng(6), list[Sample]()
    for sample in samples:
        rows = rng.random((len(sample), sum(arch.sparse), arch.experts.count)).argsort(2)[..., : arch.experts.top_k]
        routes = torch.from_numpy(rows).to(torch.int16)
        for other in found:
            size = min(len(sample), len(other))
            alike = int((sample.tokens_T[:size] == other.tokens_T[:size]).long().cumprod(0).sum())
            if other.group == sample.group and other.routes is not None:
                alike = alike // 2 if sample.group == 1 else alike
                routes[:alike] = other.routes[:alike]
        routes[3::7] = routes[-1] = -1
        found.append(replace(sample, routes=routes))
    return [*found[:-1], samples[-1]]


@contextlib.contextmanager
def one_mesh() -> Iterator[None]:
    """Engines of one world that are made within it share their groups: the trials differ in other things."""
    made, create = [], Mesh.create

    def once(*args):
        if not made:
            made.append(create(*args))
        return made[0]

    with mock.patch.object(Mesh, "create", once):
        yield


@contextlib.contextmanager
def _engine(config: Config) -> Iterator[Engine]:
    """With buckets of few weights where something is overlapped, and the experts of a GPU where messages have a
    bound."""
    with contextlib.ExitStack() as stack:
        late = bool(config.parallel.overlap_param_gather)
        if late or config.parallel.overlap_grad_reduce:
            stack.enter_context(gathering.small_buckets(late=late))
        if config.moe.dispatch_bound is not None:
            stack.enter_context(grouped.on_cpu())
        yield Engine(config)


def _measured(trial: Trial, frozen: bytes, reference: str, write: bool) -> Found:
    samples, loss = thaw(frozen), trial.case.build()
    with _engine(trial.config) as engine:
        if trial.routed:
            samples = with_routes(samples, engine.arch)
        gradients: dict[str, Tensor] = {}
        optim_step = engine.optim_step

        def keep_gradients(*limits):
            gradients.update((name, gradient.clone()) for name, gradient in engine.gradients())
            return optim_step(*limits)

        with (
            recorded(engine.chunks, sum(map(len, samples))) as choices,
            mock.patch.object(engine, "optim_step", keep_gradients),
        ):
            metrics, result = engine.train_step(samples, loss, lr=0.0)
        if write:
            save_file({name: g.contiguous() for name, g in gradients.items()} | as_tensors(choices), reference)
        assert (metrics.replayed is not None) == trial.routed
        mesh = engine.mesh
        leader = (mesh.dp_context.rank() == 0 and mesh.tp.rank() == 0) or mesh.expert_dp.rank() == 0
        step = Measurement(
            metrics.loss,
            metrics.magnitude,
            {**metrics.terms, **metrics.observed},
            result.grad_norm,
            metrics.weight_sum,
            metrics.micro_batches,
            None,
            parity._compare(gradients, reference) if leader else {},
            compare_choices(choices, reference),
        )
    moved = _moved(trial.stepped, frozen, trial.case, f"{reference}.moved", write) if trial.stepped else {}
    return Found(step, metrics.reruns, moved)


def _moved(config: Config, frozen: bytes, case: Case, reference: str, write: bool) -> dict[str, tuple[float, float]]:
    samples, loss = thaw(frozen), case.build()
    with _engine(config) as engine:
        before = {name: weight.double().clone() for name, weight in engine.weights()}
        for _ in range(STEPS):
            assert engine.train_step(samples, loss)[1].applied
        ways = {name: weight.double() - before[name] for name, weight in engine.weights()}
    if write:
        save_file({name: way.contiguous() for name, way in ways.items()}, reference)
    with safe_open(reference, "pt") as file:
        wanted = {name: file.get_tensor(name) for name in ways}
    return {
        name: (float(wanted[name].square().sum()), float((way - wanted[name]).square().sum()))
        for name, way in ways.items()
    }
