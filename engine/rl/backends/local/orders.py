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
    """what: "submit" brings `rows`, "drop" forgets the requests `ids`, "end" leaves all other requests in flight.

    rows: the new rows of each model.
    """

    what: Literal["submit", "drop", "pause", "resume", "abort", "end"]
    rows: tuple[tuple[ActiveSequence, ...], ...] = ()
    ids: tuple[str, ...] = ()


class OrderLog:
    """Orders in one sequence: rank 0 writes each under its number, and every rank reads them by number.

    So all ranks carry out a request, a pause or an end in the same order, from whatever thread of rank 0 it came. Ranks
    that decode together agree on a number, read up to it and take the next token: none is left alone in a collective.
    Collective over the world: one broadcast.

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
        """On rank 0."""
        self._set(f"order/{self.known}", order)
        self.known += 1

    def look(self) -> int:
        """Return `known`, brought up to date every LOOK_SECONDS."""
        if self._rank > 0 and time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            while self._store.check([f"order/{self.known}"]):
                self.known += 1
        return self.known

    def wait(self) -> None:
        """Wait for an order that this rank has not read, on a rank but 0."""
        with watchdog.patient():
            while self._read == self.known:
                self._looked = 0.0
                self.look()
                time.sleep(IDLE_SECONDS)

    def read(self, number: int) -> Iterator[Order]:
        """Yield the orders before this number that this rank has not read; all of them are written."""
        while self._read < number:
            self._read += 1
            yield pickle.loads(self._store.get(f"order/{self._read - 1}"))

    def skip(self, number: int) -> None:
        """Leave out orders before this number: this rank failed. Rank 0 deletes them: every rank has read them."""
        self._read = self.known = number
        if self._rank == 0:
            for old in range(self._deleted, number):
                self._store.delete_key(f"order/{old}")
            self._deleted = number

    def send(self, result: object) -> None:
        """Send to rank 0."""
        self._set(f"result/{self._store.add('results', 1) - 1}", result)

    def _set(self, key: str, value: object) -> None:
        self._store.set(key, pickle.dumps(value))  # pyright: ignore[reportArgumentType]  (torch's stub names str alone)

    def results(self, every: float) -> Iterator[Any]:
        """Yield what ranks have sent, on rank 0; looked up at most once in `every` seconds."""
        if time.monotonic() - self._looked < every:
            return
        self._looked = time.monotonic()
        while self._store.check([key := f"result/{self._received}"]):
            self._received += 1
            yield pickle.loads(self._store.get(key))
            self._store.delete_key(key)
