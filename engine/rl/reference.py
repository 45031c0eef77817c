"""The initial policy, in the layout of the policy and without a second model."""

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.memory.offload import Offloader, pinned_like
from isoloss.engine.run.folder import Fingerprint
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.model_source import ModelSource
from isoloss.models.weights.weight_map import weight_map
from isoloss.parallel.collectives import gather_objects

PIECE = 1 << 26  # bytes; two of them hide each other's way


class Reference:
    """The weights that the engine has now, to be asked for log-probabilities later.

    offload: they wait in pinned host memory, taken once; else beside the policy's. Either way they change places with
    the policy's for the pass, piece by piece, so that the device never holds more than two pieces besides the two
    copies (offload: the one).
    """

    def __init__(self, engine: Engine, *, offload: bool):
        self._engine = engine
        self._live = [tensor.data for tensor in engine.model.tensors() if tensor.is_floating_point()]
        self._kept = pinned_like(self._live) if offload else [torch.empty_like(tensor) for tensor in self._live]
        for kept, live in zip(self._kept, self._live):
            kept.copy_(live)
        self._left = torch.cuda.Event(), torch.cuda.Event()  # of each spare piece
        self._residents = Offloader(engine.device, lambda: () if offload else self._kept)

    def offload(self) -> None:
        """As `Engine.offload`, of the reference's own weights."""
        self._residents.leave()

    def logprobs(self, samples: Sequence[Sample], temperature: float) -> list[Tensor]:
        """As `Engine.logprobs`, of the initial policy."""
        self._engine.return_to_device()
        self._residents.onload()
        self._exchange()
        try:
            return self._engine.logprobs(samples, temperature)
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Pieces come and go at the same time, each way on a stream of its own, and the host waits for none."""
        coming, going = torch.cuda.current_stream(), torch.cuda.Stream()
        spares = [torch.empty(PIECE, dtype=torch.uint8, device=self._engine.device) for _ in range(2)]
        for index, (live, kept) in enumerate(self._pieces()):
            spare, left = spares[index % 2][: live.nbytes], self._left[index % 2]
            if index >= 2:
                coming.wait_event(left)  # before it is written to again
            spare.copy_(live)
            live.copy_(kept, non_blocking=True)
            going.wait_stream(coming)
            with torch.cuda.stream(going):
                kept.copy_(spare, non_blocking=True)
                left.record()
        coming.wait_stream(going)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The bytes of both models, cut alike."""
        for live, kept in zip(self._live, self._kept):
            bytes_ = (each.view(-1).view(torch.uint8).split(PIECE) for each in (live, kept))
            yield from zip(*bytes_)


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
