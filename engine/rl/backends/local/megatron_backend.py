"""The rollout backend of the trainer's own model: what trains also generates."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from isoloss.engine.rl.backends.local.base import LocalBackend
from isoloss.engine.rl.backends.local.megatron_decoder import MegatronDecoder
from isoloss.engine.rl.backends.protocol import Bucket, Receives
from isoloss.engine.step.engine import Engine


class MegatronBackend(LocalBackend):
    """Generates with the engine's weights as they are. They never travel, and there is no second copy.

    Every rank of dp x context has a model of its own; its tp x pp ranks decode the same rows together. With ep > 1,
    models share experts: they go from token to token together, and one that has no rows left reads a token for the
    others' sake.
    Collective over the world.
    """

    receives: Receives = "every rank"

    def __init__(self, engine: Engine, concurrency: int):
        super().__init__(engine.arch, concurrency)
        self._engine, world = engine, dist.group.WORLD
        assert world is not None, "an engine is of a world"
        self._together = engine.mesh.stage if engine.mesh.layout.ep == 1 else world

    def decoder(self) -> MegatronDecoder:
        return MegatronDecoder(self._engine.whole_model())

    def share(self) -> tuple[int, int]:
        replicas = self._engine.mesh.dp_context
        return replicas.rank(), replicas.size()

    def speaks(self) -> bool:
        return self._engine.mesh.stage.rank() == 0

    def proceed(self, working: bool) -> bool:
        """All ranks that decode together go on, or none: as long as one has rows left. One all-reduce among them."""
        if self._together.size() == 1:
            return super().proceed(working)
        told = torch.tensor([working, not self._gate.open()], dtype=torch.int32, device=self._engine.device)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._together)
        return told.tolist() == [1, 0]

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> None:
        """The weights are those of the engine already: nothing is asked of `buckets`."""
        self._version = version
