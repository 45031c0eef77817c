"""The initial policy, in the layout of the policy and without a second model."""

import hashlib
import zlib
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.engine.batch import Sample
from isoloss.engine.engine import Engine
from isoloss.engine.model_source import ModelSource
from isoloss.engine.residents import Residents
from isoloss.engine.run_folder import Fingerprint
from isoloss.models.weights.weight_map import weight_map
from isoloss.parallel.collectives import gather_objects


class Reference:
    """The weights that the engine has now, to be asked for log-probabilities later.

    offload: they wait in CPU memory; else beside the policy's. Either way they change places with the policy's for the
    pass, tensor by tensor, so that the device never holds more than one tensor besides the two copies (offload: the
    one).
    """

    def __init__(self, engine: Engine, *, offload: bool):
        self._engine = engine
        self._live = [tensor.data for tensor in engine.model.tensors() if tensor.is_floating_point()]
        self._kept = [tensor.to("cpu" if offload else tensor.device, copy=True) for tensor in self._live]
        self._residents = Residents(engine.device, lambda: () if offload else self._kept)

    def leave_device(self) -> None:
        """As `Engine.leave_device`, of the reference's own weights."""
        self._residents.leave()

    def logprobs(self, samples: Sequence[Sample], temperature: float) -> list[Tensor]:
        """As `Engine.logprobs`, of the initial policy."""
        self._engine.return_to_device()
        self._residents.come_back()
        self._exchange()
        try:
            return self._engine.logprobs(samples, temperature)
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for live, kept in zip(self._live, self._kept):
            there = live.to(kept.device, copy=True)
            live.copy_(kept)
            kept.copy_(there)


def fingerprint(source: ModelSource) -> Fingerprint:
    """Of the weights that model.path has now, however its files divide them: CRC-32 of every tensor.

    They are read once more, one at a time, the ranks sharing the work. One all-gather over the world.
    """
    weights = weight_map(source.arch)[dist.get_rank() :: dist.get_world_size()]
    mine = [(weight.name, _crc32(source.weights.whole(weight))) for weight in weights]
    checksums = sorted(chain.from_iterable(gather_objects(mine)))
    digest = hashlib.sha256(repr(checksums).encode()).hexdigest()[:16]
    return Fingerprint("the reference (the weights of model.path)", digest, "a file of model.path")


def _crc32(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
