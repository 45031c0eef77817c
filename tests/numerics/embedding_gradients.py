"""Runs on every rank of a worker pool: the gradients of a model whose embedding adds its own to Megatron's buffer."""

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch
from support.models.transformers_parity import Evaluated, evaluate

from isoloss.engine.batching.sample import Sample
from isoloss.engine.step import engine
from isoloss.models.mcore import patches
from isoloss.parallel.ops.embedding import embed


def both_ways(folder: Path, samples: Sequence[Sample], parallel: dict) -> tuple[Evaluated, Evaluated, int]:
    """By autograd, and added in place; and how often the embedding was asked to. Memory that is not written is NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        with mock.patch.object(engine, "accumulate_in_embedding", lambda chunks: None):
            by_autograd = evaluate(folder, samples, parallel)
        with mock.patch.object(patches, "embed", side_effect=embed) as asked:
            return by_autograd, evaluate(folder, samples, parallel), asked.call_count
    finally:
        torch.use_deterministic_algorithms(False)
