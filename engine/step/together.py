"""Compute forward and backward of several engines of one model in one schedule."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from isoloss.engine.batching.sample import Sample
from isoloss.engine.step.forward_backward import Pass, StepMetrics, run_steps
from isoloss.engine.step.losses import LossLike
from isoloss.engine.step.trained import Trained
from isoloss.models.model import Model


class Trains(Protocol):
    """Describe an `Engine` to these functions."""

    trained: Trained
    model: Model

    def new_pass(self, samples: Sequence[Sample], loss: LossLike) -> Pass: ...


Call = tuple[Trains, Sequence[Sample], LossLike]


def forward_backward_together(calls: Sequence[Call]) -> list[StepMetrics]:
    """Call forward_backward of several engines at once: their micro-batches fill one schedule, which a pipeline of many
    stages and few micro-batches would leave half empty. Return the metrics of each; their durations are those of all.

    calls: engines of one model (`Engine.adapter`), each once, with samples and loss as for `Engine.forward_backward`.
    To the last bit gradients and metrics are those of single calls.
    Raises ValueError for engines of several models, and as `Engine.forward_backward`. Collectives: those of the single
    calls, in the order of the calls; the model's at once.
    """
    engines = [engine for engine, *_ in calls]
    if len({id(engine) for engine in engines}) < len(engines) or len({id(engine.model) for engine in engines}) > 1:
        raise ValueError("forward_backward_together() needs engines of one model (Engine.adapter), each once")
    return run_calls(calls)


def run_calls(calls: Sequence[Call], dispatch_bound: float | None = None) -> list[StepMetrics]:
    """Accumulate the gradients of calls, one of each engine, in one schedule. dispatch_bound: as for `run_steps`."""
    started, engines = time.perf_counter(), [engine for engine, *_ in calls]
    model = engines[0].model
    passes = [engine.new_pass(samples, loss) for engine, samples, loss in calls]
    chunks = [chunk for engine in engines for chunk in engine.trained.chunks]
    model.modules[0].config.no_sync_func = partial(_no_sync, chunks)
    found = run_steps(model, passes, dispatch_bound=dispatch_bound)
    for engine, metrics in zip(engines, found):
        engine.trained.finite &= math.isfinite(metrics.loss)
        engine.trained.tokens += metrics.valid_tokens
    return [dataclasses.replace(metrics, seconds=time.perf_counter() - started) for metrics in found]


@contextlib.contextmanager
def _no_sync(chunks: Sequence[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            stack.enter_context(chunk.no_sync())
        yield
