"""How weights reach servers."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from isoloss.engine.rl.backends.protocol import Bucket
from isoloss.engine.rl.backends.servers.server import Server


class WeightSync(Protocol):
    """One way for weights to reach the servers: between `begin_update` and `end_update` of every server, bucket after
    bucket. Of its methods only `prepare` is called on every rank.

    receives: which ranks `prepare` needs the tensors on.
    """

    receives: Literal["every rank", "rank 0"]

    def prepare(self, bucket: Bucket) -> Any:
        """What `send` takes, from the bucket of this rank. May be collective over the world."""
        ...

    def begin(self, servers: Sequence[Server], rebuild: bool) -> None:
        """Before the first bucket. rebuild: the servers may not be those of the last update any more."""
        ...

    def send(self, servers: Sequence[Server], payload: Any) -> None: ...

    def end(self, servers: Sequence[Server]) -> None:
        """After the last bucket."""
        ...

    def close(self, servers: Sequence[Server]) -> None:
        """Let go of everything. The servers may be gone."""
        ...
