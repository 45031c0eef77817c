"""Orders of rank 0 that every rank carries out while it generates, and the completions that go back to rank 0.

They travel through the process group's key-value store, not by collectives: ranks take different numbers of steps.
"""

import pickle
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from isoloss.engine.instruments import watchdog
from isoloss.engine.rl.backends.local.continuous_batching import ActiveSequence

LOOK_SECONDS = 0.05  # how often a rank that generates looks for orders, and rank 0 for completions
IDLE_SECONDS = 0.002  # the same for a rank that has nothing to generate


@dataclass(frozen=True)
class Order:
    """An order to every rank; "end" ends `serve` and keeps requests in flight.

    rows: new rows, by the index of the model.
    ids: requests to forget.
    """

    what: Literal["submit", "drop", "pause", "resume", "abort", "end"]
    rows: tuple[tuple[ActiveSequence, ...], ...] = ()
    ids: tuple[str, ...] = ()


class OrderLog:
    """Orders in one sequence: rank 0 writes each under its number, and every rank reads them by number.

    All ranks carry out orders in this sequence. Ranks that decode together agree on a number and read up to it before
    each token, so that they enter the same collectives. The constructor is collective over the world: one broadcast.
    The methods are not.

    known: number of orders that this rank knows to be written.
    """

    def __init__(self):
        self._rank = dist.get_rank()
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=0)
        self._store = dist.PrefixStore(name[0], dist.distributed_c10d._get_default_store())
        self.known = 0
        self._read = self._received = self._deleted = 0
        self._looked = 0.0

    def write(self, order: Order) -> None:
        """Append an order, on rank 0."""
        self._set(f"order/{self.known}", order)
        self.known += 1

    def look(self) -> int:
        """Return `known`, after an update if LOOK_SECONDS have passed."""
        if self._rank > 0 and time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            while self._store.check([f"order/{self.known}"]):
                self.known += 1
        return self.known

    def wait(self) -> None:
        """Wait without a limit for an order to read, on a rank other than 0."""
        with watchdog.patient():
            while self._read >= self.known:  # `read` goes up to another rank's number, which may be larger
                self._looked = 0.0
                self.look()
                time.sleep(IDLE_SECONDS)

    def read(self, number: int) -> Iterator[Order]:
        """Yield unread orders before this number, each once. All of them must have been written."""
        while self._read < number:
            self._read += 1
            yield pickle.loads(self._store.get(f"order/{self._read - 1}"))

    def skip(self, number: int) -> None:
        """Mark orders before this number as read. Rank 0 deletes them too: call it once no rank needs them."""
        self._read = self.known = number
        if self._rank == 0:
            for old in range(self._deleted, number):
                self._store.delete_key(f"order/{old}")
            self._deleted = number

    def send(self, result: object) -> None:
        """Store a completion, or the text of a failure, for `results`."""
        self._set(f"result/{self._store.add('results', 1) - 1}", result)

    def _set(self, key: str, value: object) -> None:
        self._store.set(key, pickle.dumps(value))  # pyright: ignore[reportArgumentType]  (torch's stub names str alone)

    def results(self, every: float) -> Iterator[Any]:
        """Yield on rank 0 what ranks have sent; nothing within `every` seconds of the last look."""
        if time.monotonic() - self._looked < every:
            return
        self._looked = time.monotonic()
        while self._store.check([key := f"result/{self._received}"]):
            self._received += 1
            yield pickle.loads(self._store.get(key))
            self._store.delete_key(key)
