"""The weight stream and the rollout backend in this process, in some layout; runs on every rank."""

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args
from unittest import mock

import torch
import torch.distributed as dist

from isoloss.engine.batching.sample import Sample
from isoloss.engine.rl.backends.local.megatron_backend import MegatronBackend
from isoloss.engine.rl.backends.local.transformers_backend import TransformersBackend
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.engine.step.engine import Engine
from isoloss.models.mcore.weight_stream import Named, Receives
from support.models.families import VOCAB
from support.models.transformers_parity import TOKEN_MEAN, make_engine, make_samples
from support.ranks.rank0 import of_rank_0
from support.runs.waiting import until


def stream(engine: Engine, bucket_bytes: int = 20_000, receives: Receives = "every rank"):
    return engine.weight_stream(bucket_bytes, receives)


def buckets(folder: Path, bucket_bytes: int, parallel: dict) -> dict[Receives, list[list[Named]]]:
    """What arrives on this rank."""
    engine = make_engine(folder, "fp32", **parallel)
    return {receives: copied(stream(engine, bucket_bytes, receives)) for receives in get_args(Receives)}


def batches_of_messages(folder: Path, parallel: dict) -> list[int]:
    """Of a stream to rank 0: how many messages are in each batch that this rank takes part in."""
    engine, batches, batch = make_engine(folder, "fp32", **parallel), [], dist.batch_isend_irecv

    def counted(messages: list[dist.P2POp]) -> list[dist.Work]:
        batches.append(len(messages))
        return batch(messages)

    with mock.patch.object(dist, "batch_isend_irecv", counted):
        for _ in stream(engine, receives="rank 0"):
            pass
    return batches


def copied(buckets: Iterable[list[Named]]) -> list[list[Named]]:
    return [[(name, tensor.cpu().clone()) for name, tensor in bucket] for bucket in buckets]


def make_backend(
    engine: Engine, folder: Path, concurrency: int = 5, kind: str = "transformers"
) -> TransformersBackend | MegatronBackend:
    if kind == "megatron":
        return MegatronBackend(engine, concurrency)
    return TransformersBackend(folder, engine.model.dtype, engine.device, concurrency)


def worst_difference(engine: Engine, requests: Sequence[Request], completions: Sequence[Completion]) -> float:
    """Between the log-probabilities of a rollout and the engine's of the same tokens, over all tokens."""
    samples = []
    for request, completion in zip(requests, completions, strict=True):
        tokens = torch.tensor([*request.prompt_tokens, *completion.tokens])
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


def rounds(
    folder: Path,
    requests: Sequence[Request],
    sampling: Sampling,
    parallel: dict,
    count: int,
    kind: str = "transformers",
    precision: str = "fp32",
) -> list[Round]:
    """Optimizer step, weights to the backend, rollout: `count` times."""
    engine = make_engine(folder, precision, **parallel)
    backend = make_backend(engine, folder, kind=kind)
    done = []
    completions: list[Completion] | None = None
    for version in range(count):
        assert engine.train_step(make_samples((30, 41, 22, 35, 9), VOCAB, seed=version), TOKEN_MEAN)[1].applied
        stale = worst_difference(engine, requests, completions) if completions else math.inf
        backend.update_weights(stream(engine), version)
        assert backend.weight_version() == version
        completions = of_rank_0(backend.generate(requests, sampling))
        done.append(Round(completions, worst_difference(engine, requests, completions), stale))
    return done


def bf16_buckets(folder: Path, parallel: dict) -> list[list[Named]]:
    """Of an engine in fp32."""
    engine = make_engine(folder, "fp32", **parallel)
    return copied(engine.model.weight_stream(100_000, "every rank", torch.bfloat16))


def completions(folder: Path, requests: Sequence[Request], sampling: Sampling, precision: str) -> list[Completion]:
    """Of the model in the folder."""
    engine = make_engine(folder, precision)
    backend = make_backend(engine, folder)
    backend.update_weights(stream(engine), 4)
    return of_rank_0(backend.generate(requests, sampling))


@dataclass(frozen=True)
class Interrupted:
    """What `generate` gave where the backend was told, while it was paused, to resume or to abort; then once more."""

    resumed: list[Completion]
    aborted: list[Completion]
    afterwards: list[Completion]


def interrupted(
    folder: Path, requests: Sequence[Request], sampling: Sampling, parallel: dict, kind: str
) -> Interrupted:
    engine = make_engine(folder, "fp64", **parallel)
    backend = make_backend(engine, folder, kind=kind)
    backend.update_weights(stream(engine), 4)

    def generate_and(act: Callable[[], None]) -> list[Completion]:
        """Nothing is produced before `act`, which another thread does once generation is under way."""
        backend.pause()

        def later():
            until(lambda: backend._model_of or dist.get_rank() > 0, "requests were in flight")
            act()

        thread = threading.Thread(target=later)
        thread.start()
        found = of_rank_0(backend.generate(requests, sampling))
        thread.join()
        return found

    resumed = generate_and(backend.resume)
    aborted = generate_and(backend.abort)
    backend.resume()
    return Interrupted(resumed, aborted, of_rank_0(backend.generate(requests, sampling)))


def failure_of_rank_1(folder: Path, requests: Sequence[Request], sampling: Sampling) -> str:
    """What this rank raises where generation fails on rank 1."""
    engine = make_engine(folder, "fp32")
    backend = make_backend(engine, folder)
    backend.update_weights(stream(engine), 4)
    if dist.get_rank() == 1:
        backend.model.base_model.forward = None
    try:
        backend.generate(requests, sampling)
    except RuntimeError as error:
        return str(error)
    return "nothing"
