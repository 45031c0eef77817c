"""Requests that threads of rank 0 submit while all ranks generate; runs on every rank."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from support.models.transformers_parity import make_engine
from support.runs.rollouts import make_backend, stream


@dataclass(frozen=True)
class Joined:
    """On rank 0: completions of requests that came one after the other, and those of each request alone."""

    joined: list[Completion]
    alone: list[Completion]


def joined(folder: Path, requests: Sequence[Request], sampling: Sampling, parallel: dict, kind: str) -> Joined | None:
    engine = make_engine(folder, "fp64", **parallel)
    backend = make_backend(engine, folder, kind=kind)
    backend.update_weights(stream(engine), 1)
    alone = [backend.generate([request], sampling)[0] for request in requests]
    done: dict[str, Completion] = {}
    goal: Future[None] = Future()
    left = list(requests)

    def ended(future: Future[Completion]) -> None:
        done[future.result().id] = future.result()
        if left:
            backend.submit(left.pop(), sampling).add_done_callback(ended)
        if len(done) == len(requests):
            goal.set_result(None)

    if dist.get_rank() == 0:
        for _ in range(2):
            backend.submit(left.pop(), sampling).add_done_callback(ended)
    backend.serve(goal)
    backend.close()
    if dist.get_rank() > 0:
        return None
    return Joined([done[request.id] for request in requests], [each for each in alone if each is not None])
