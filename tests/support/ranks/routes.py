"""Steps whose samples have routes, on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import MemoryConfig
from isoloss.engine.step.engine import Engine
from isoloss.models.mcore.moe.router import Router, routers
from isoloss.models.mcore.moe.router_losses import RoutedTokens
from support.models.transformers_parity import TOKEN_MEAN, gradients_by_hf_name, make_engine
from support.ranks.recompute import fp64_config


@dataclass(frozen=True)
class Step:
    """gradients: by Hugging Face name. live: of `live_routes`."""

    loss: float
    replayed: float | None
    gradients: dict[str, Tensor]
    logprobs: list[Tensor]
    live: list[Tensor]


def step(folder: Path, samples: Sequence[Sample]) -> Step:
    """On one rank, in several micro-batches."""
    engine = make_engine(folder, "fp64", max_tokens=64)
    live = live_routes(engine, samples)
    metrics = engine.forward_backward(samples, TOKEN_MEAN)
    return Step(metrics.loss, metrics.replayed, gradients_by_hf_name(engine), engine.logprobs(samples), live)


def live(folder: Path, samples: Sequence[Sample]) -> tuple[list[Tensor], list[Tensor]]:
    """`live_routes` in fp32, and the log-probabilities of the samples with their own."""
    engine = make_engine(folder, "fp32")
    return live_routes(engine, samples), engine.logprobs(samples)


def recomputed(folder: Path, samples: Sequence[Sample], memory: MemoryConfig) -> tuple[float, float | None, dict]:
    engine = Engine(fp64_config(folder, memory))
    metrics = engine.forward_backward(samples, TOKEN_MEAN)
    return metrics.loss, metrics.replayed, gradients_by_hf_name(engine)


def live_routes(engine: Engine, samples: Sequence[Sample]) -> list[Tensor]:
    """What the routers of one rank choose of themselves, as `Sample.routes`."""
    plain = [replace(sample, routes=None) for sample in samples]
    of_layers = [*routers(engine.chunks)]
    top_k = of_layers[0].experts.top_k
    flat = torch.full((sum(map(len, samples)), len(of_layers), top_k), -1, dtype=torch.int16)

    def record(router: Router, inputs: tuple[Tensor, RoutedTokens], outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        seen, layer = inputs[1], of_layers.index(router)
        for members_P, start in zip(seen.members_SP, seen.start_S):
            of_sample_Z = seen.of_pieces(members_P) > 0
            flat[start + seen.position_Z[of_sample_Z], layer] = outputs[2][of_sample_Z].to(torch.int16)

    hooks = [router.register_forward_hook(record) for router in of_layers]
    engine.logprobs(plain)
    for hook in hooks:
        hook.remove()
    return [*flat.split([len(sample) for sample in samples])]
