"""What rollout backends without a server have in common: every model in the training processes generates its share."""

import traceback
from collections.abc import Sequence

import torch.distributed as dist

from isoloss.engine.rl.backends.local.continuous_batching import Decoder, check_requests, generate
from isoloss.engine.rl.backends.local.pause import Gate
from isoloss.engine.rl.backends.protocol import Arrived, ignore
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.models.architecture import Architecture
from isoloss.parallel.collectives import collect_objects, gather_objects
from isoloss.parallel.rank0 import PATIENCE
from isoloss.parallel.runtime.process_group import host_group


class LocalBackend:
    """Most of a `RolloutBackend`; `decoder` and `update_weights` are left.

    concurrency: rows that decode together in one model.
    The constructor is collective over the world.
    """

    def __init__(self, arch: Architecture, concurrency: int):
        self.arch, self.concurrency = arch, concurrency
        self._version: int | None = None
        self._gate = Gate()
        self._group = host_group(PATIENCE)
        self._closed = False

    def decoder(self) -> Decoder:
        """This rank's model."""
        raise NotImplementedError

    def share(self) -> tuple[int, int]:
        """Which of how many models this rank has, or a part of."""
        return dist.get_rank(), dist.get_world_size()

    def speaks(self) -> bool:
        """Whether what this rank's model generates is asked of this rank."""
        return True

    def proceed(self, working: bool) -> bool:
        """Asked before every token: whether to go on. working: whether this model has rows left."""
        return working and self._gate.open()

    def generate(self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived = ignore) -> list[Completion]:
        """As `RolloutBackend.generate`; none is ever lost. Over the world one all-gather of outlines, and one gather of
        the completions to rank 0.

        Each model takes a block of neighbours, so that completions of one prompt mostly read it together. What a
        request gives depends on neither the ranks nor the other requests, beyond rounding.
        Raises UserError for a prompt that is empty or too long, ValueError before the first `update_weights`, and on
        every rank a RuntimeError where generation failed on one.
        """
        if self._version is None:
            raise ValueError("the model in this process has no weights yet: call update_weights before generate")
        check_requests(requests, sampling, self.arch.max_positions)
        self._gate.begin()
        index, count = self.share()
        mine = requests[index * len(requests) // count : (index + 1) * len(requests) // count]
        failure, done = "", []
        try:
            done = generate(self.decoder(), mine, sampling, self.concurrency, self._version, self.proceed, arrived)
        except Exception:  # the other ranks wait below and have to be told
            failure = traceback.format_exc()
        everyone = gather_objects((failure, [completion.outline() for completion in done]), self._group)
        for rank, (failure, _) in enumerate(everyone):
            if failure:
                raise RuntimeError(f"generation failed on rank {rank}:\n{failure}")
        outlines = {completion.id: completion for _, done in everyone for completion in done}
        shares = collect_objects(done if self.speaks() else [], self._group)
        completions = {completion.id: completion for share in shares for completion in share}
        return [(completions or outlines)[request.id] for request in requests]

    def weight_version(self) -> int | None:
        """As `RolloutBackend.weight_version`. One all-gather over the world."""
        versions = gather_objects(self._version)
        return versions[0] if len(set(versions)) == 1 else None

    def pause(self) -> None:
        """As `RolloutBackend.pause`; other ranks follow after a twentieth of a second. Nothing on ranks but 0."""
        self._gate.pause()

    def resume(self) -> None:
        """As `RolloutBackend.resume`. Nothing on ranks but 0."""
        self._gate.resume()

    def abort(self) -> None:
        """As `RolloutBackend.abort`, also while paused; other ranks follow after a twentieth of a second. Nothing on
        ranks but 0, and nothing where `generate` is not under way."""
        self._gate.abort()

    def check_health(self) -> None:
        """A model in this process is there for as long as the process."""

    def take_counts(self) -> dict[str, int]:
        """As `RolloutBackend.take_counts`: none, for there is no server."""
        return {}

    def close(self) -> None:
        """As `RolloutBackend.close`; a closed backend serves no weights."""
        self._version = None
        if not self._closed:
            self._closed = True
            dist.destroy_process_group(self._group)
