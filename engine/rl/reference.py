"""Compute log-probabilities of the initial policy, in the layout of the policy and without a second model.

Where an adapter is trained the initial policy is the same frozen model with the adapter that training began with.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from isoloss.engine.batching.sample import Sample
from isoloss.engine.memory.offload import Offloader, pinned_like
from isoloss.engine.run.folder import Fingerprint
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.model_source import ModelSource, digest, digest_of
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import factor_weights

PIECE = 1 << 26  # bytes; the copies of two pieces overlap


class Reference:
    """A copy of the weights that the engine trains, as they are now, to compute log-probabilities with later.

    offload: storage in pinned host memory, allocated once; otherwise on the device. Either way the copy changes places
    with the policy's weights for a pass, piece by piece: the device never holds more than two pieces in addition to the
    two sets of weights (offload: the one set).
    """

    def __init__(self, engine: Engine, *, offload: bool):
        self._engine = engine
        self._live = [tensor.data for tensor in engine.trained.tensors() if tensor.is_floating_point()]
        self._kept = pinned_like(self._live) if offload else [torch.empty_like(tensor) for tensor in self._live]
        for kept, live in zip(self._kept, self._live):
            kept.copy_(live)
        self._left = torch.cuda.Event(), torch.cuda.Event()  # one for each spare piece, when it is free again
        self._residents = Offloader(engine.device, lambda: () if offload else self._kept)

    def offload(self) -> None:
        """Offload the reference's own weights, as `Engine.offload` does the policy's."""
        self._residents.leave()

    def logprobs(self, samples: Sequence[Sample], temperature: float) -> list[Tensor]:
        """Return log-probabilities of the initial policy, as `Engine.logprobs` does of the present one."""
        self._engine.return_to_device()
        self._residents.onload()
        self._exchange()
        try:
            return self._engine.logprobs(samples, temperature)
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange the two sets of weights: pieces come and go at once, on two streams, and the host does not wait."""
        coming, going = torch.cuda.current_stream(), torch.cuda.Stream()
        spares = [torch.empty(PIECE, dtype=torch.uint8, device=self._engine.device) for _ in range(2)]
        for index, (live, kept) in enumerate(self._pieces()):
            spare, left = spares[index % 2][: live.nbytes], self._left[index % 2]
            if index >= 2:
                coming.wait_event(left)  # before the spare is written to again
            spare.copy_(live)
            live.copy_(kept, non_blocking=True)
            going.wait_stream(coming)
            with torch.cuda.stream(going):
                kept.copy_(spare, non_blocking=True)
                left.record()
        coming.wait_stream(going)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the bytes of both sets of weights, cut alike."""
        for live, kept in zip(self._live, self._kept):
            bytes_ = (each.view(-1).view(torch.uint8).split(PIECE) for each in (live, kept))
            yield from zip(*bytes_)


def fingerprints(source: ModelSource, lora: LoraConfig) -> list[Fingerprint]:
    """Return fingerprints of the weights in model.path and of the adapter that training begins with. Collective as
    `digest`."""
    model = Fingerprint("the reference (the weights of model.path)", digest(source), "a file of model.path")
    if lora.rank == 0:
        return [model]
    adapter = digest_of(factor_weights(source.arch, lora), source.factors)
    return [model, Fingerprint("the reference's adapter", adapter, "lora.init, lora.seed or train.seed")]
