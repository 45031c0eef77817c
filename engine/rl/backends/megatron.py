"""The rollout backend of the trainer's own model: what trains also generates."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from isoloss.engine.engine import Engine
from isoloss.engine.rl.backends.local import LocalBackend
from isoloss.engine.rl.backends.megatron_decoder import MegatronDecoder
from isoloss.engine.rl.backends.protocol import Bucket, Receives


class MegatronBackend(LocalBackend):
    """Generates with the engine's weights as they are. They never travel, and there is no second copy.

    Every rank of dp x context has a model of its own; its tp ranks decode the same rows together.
    Collective over the world.
    """

    receives: Receives = "every rank"

    def __init__(self, engine: Engine, concurrency: int):
        super().__init__(engine.arch, concurrency)
        self._engine, self._tp = engine, engine.mesh.tp

    def decoder(self) -> MegatronDecoder:
        return MegatronDecoder(self._engine.whole_model())

    def share(self) -> tuple[int, int]:
        replicas = self._engine.mesh.dp_context
        return replicas.rank(), replicas.size()

    def proceed(self) -> bool:
        """All ranks of tp go on, or none."""
        going = super().proceed()
        if self._tp.size() == 1:
            return going
        told = torch.tensor(int(going), device=self._engine.device)
        dist.all_reduce(told, dist.ReduceOp.MIN, group=self._tp)
        return bool(told)

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> None:
        """The weights are those of the engine already: nothing is asked of `buckets`."""
        self._version = version

    def close(self) -> None:
        """The model is the trainer's."""
        self._version = None
