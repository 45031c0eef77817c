"""What the ranks of the invariance tests run."""

from unittest import mock

import torch
import torch.distributed as dist

from isoloss.engine.config import Config, LossConfig
from isoloss.engine.engine import Engine
from isoloss.engine.losses import cross_entropy
from isoloss.tools.parity import thaw


def losses(config: Config, frozen: bytes, steps: int) -> list[float]:
    """The loss of each of `steps` optimizer steps on the same samples."""
    engine = Engine(config)
    samples = thaw(frozen)
    loss = cross_entropy(LossConfig())
    return [engine.train_step(samples, loss)[0].loss for _ in range(steps)]


def count_reductions(config: Config, frozen: bytes) -> tuple[int, int]:
    """How many all-reduces of int64 tensors one step enters, and its number of micro-batches."""
    engine = Engine(config)
    samples = thaw(frozen)
    calls = []
    original = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        if tensor.dtype == torch.int64:
            assert kwargs["group"] is engine.mesh.dp
            calls.append(tensor.shape)
        return original(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        metrics = engine.forward_backward(samples, cross_entropy(LossConfig()))
    return len(calls), metrics.micro_batches


def logprobs(config: Config, frozen: bytes) -> list[list[float]]:
    """log-probabilities of every sample's targets."""
    return [values.tolist() for values in Engine(config).logprobs(thaw(frozen))]
