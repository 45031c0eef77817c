"""Completions with the routes that the trained model itself recorded, and log-probabilities of them; on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.rl.backends.local.megatron_backend import MegatronBackend
from isoloss.engine.rl.routes import RoutesForm
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.models.mcore.moe.router import Router, routers
from support.models.transformers_parity import TOKEN_MEAN, make_engine
from support.ranks.rank0 import of_rank_0


@dataclass(frozen=True)
class Rollout:
    """tokens, routes: of each completion. replayed, live: the largest difference between the log-probabilities of the
    rollout and the trainer's, with routes and without, of tokens before the cut. part: `StepMetrics.replayed`."""

    tokens: list[tuple[int, ...]]
    routes: list[np.ndarray]
    replayed: float
    live: float
    part: float | None


def rollout(
    folder: Path, requests: Sequence[Request], sampling: Sampling, parallel: dict, noise: float, cut: int | None = None
) -> Rollout:
    """noise: of the router's logits in the rollout; with any, the routers nearly have no preference of their own.
    cut: tokens after which every completion is aborted, and goes on as a partial one."""
    engine = make_engine(folder, "fp32", **parallel)
    if noise:
        for router in routers(engine.chunks):
            router.weight.data *= noise
    logits, random = Router.logits, torch.Generator().manual_seed(4)

    def noisy(router: Router, hidden: Tensor) -> Tensor:
        found = logits(router, hidden)
        return found + noise * torch.randn(found.shape, generator=random)

    backend = MegatronBackend(engine, 3)
    sampling = replace(sampling, routes=RoutesForm.of(engine.arch))
    with mock.patch.object(Router, "logits", noisy):
        backend.update_weights([], 0)
        if cut is not None:
            first = of_rank_0(backend.generate(requests, replace(sampling, max_new_tokens=cut)))
            requests = [replace(request, partial=done) for request, done in zip(requests, first, strict=True)]
        completions: list[Completion] = of_rank_0(backend.generate(requests, sampling))
    backend.close()
    samples = []
    for request, completion in zip(requests, completions, strict=True):
        assert completion.routes is not None
        tokens = torch.tensor([*request.prompt_tokens, *completion.tokens])
        mask = torch.arange(len(tokens)) >= len(request.prompt_tokens)
        samples.append(Sample(tokens, mask, routes=torch.from_numpy(completion.routes)))
    part = engine.evaluate(samples, TOKEN_MEAN).replayed
    worst = []
    for asked in (samples, [replace(sample, routes=None) for sample in samples]):
        pairs = zip(engine.logprobs(asked), completions, strict=True)
        said = [(found[-len(c.tokens) :], torch.tensor(c.logprobs[:], dtype=torch.float64)) for found, c in pairs]
        worst.append(max(float((found - rollout)[:cut].abs().max()) for found, rollout in said))
    tokens = [completion.tokens[:] for completion in completions]
    return Rollout(
        tokens, [completion.routes for completion in completions if completion.routes is not None], *worst, part
    )
