"""The weight stream and the rollout backend in this process, in some layout; runs on every rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from isoloss.engine.batch import Sample
from isoloss.engine.engine import Engine
from isoloss.engine.rl.in_process import InProcessBackend
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.models.weight_stream import Named, Receives, stream_weights
from worlds.families import VOCAB
from worlds.transformers_parity import TOKEN_MEAN, make_engine, make_samples


def stream(engine: Engine, bucket_bytes: int = 20_000, receives: Receives = "every rank"):
    return stream_weights(engine.chunks, engine.arch, engine.mesh, engine.dtype, bucket_bytes, receives)


def buckets(folder: Path, bucket_bytes: int, receives: Receives, parallel: dict) -> list[list[Named]]:
    """What arrives on this rank."""
    engine = make_engine(folder, "fp32", **parallel)
    return [
        [(name, tensor.cpu().clone()) for name, tensor in bucket] for bucket in stream(engine, bucket_bytes, receives)
    ]


def make_backend(engine: Engine, folder: Path, concurrency: int = 5) -> InProcessBackend:
    return InProcessBackend(folder, engine.dtype, engine.device, concurrency)


def worst_difference(engine: Engine, requests: Sequence[Request], completions: Sequence[Completion]) -> float:
    """Between the log-probabilities of a rollout and the engine's of the same tokens, over all tokens."""
    samples = []
    for request, completion in zip(requests, completions, strict=True):
        tokens = torch.tensor(request.prompt_tokens + completion.tokens)
        samples.append(Sample(tokens, torch.arange(len(tokens)) >= len(request.prompt_tokens)))
    worst = 0.0
    for request, completion, logprobs in zip(requests, completions, engine.logprobs(samples)):
        rollout = torch.tensor(completion.logprobs, dtype=torch.float64)
        worst = max(worst, float((logprobs.cpu()[len(request.prompt_tokens) :] - rollout).abs().max()))
    return worst


@dataclass(frozen=True)
class Round:
    """worst: difference of log-probabilities. stale: the same, had the weights not been sent."""

    completions: list[Completion]
    worst: float
    stale: float


def rounds(folder: Path, requests: Sequence[Request], sampling: Sampling, parallel: dict, count: int) -> list[Round]:
    """Optimizer step, weights to the backend, rollout: `count` times."""
    engine = make_engine(folder, "fp32", **parallel)
    backend = make_backend(engine, folder)
    done = []
    completions: list[Completion] | None = None
    for version in range(count):
        assert engine.train_step(make_samples((30, 41, 22, 35, 9), VOCAB, seed=version), TOKEN_MEAN)[1].applied
        stale = worst_difference(engine, requests, completions) if completions else math.inf
        backend.update_weights(stream(engine), version)
        assert backend.weight_version() == version
        completions = backend.generate(requests, sampling)
        done.append(Round(completions, worst_difference(engine, requests, completions), stale))
    return done
