"""The order in which requests are carried out: within a training client by their numbers, whatever the network did;
between training clients in turn; requests for completions of one version together."""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Order(Generic[Item]):
    """Requests that wait.

    next_seq: the number that is due, by training client. A request with a later number is held until those before it
        are here.
    """

    def __init__(self):
        self._next: dict[str, int] = {}
        self._held: dict[str, dict[int, Item]] = {}
        self._turns: deque[str] = deque()
        self._samples: OrderedDict[str, deque[Item]] = OrderedDict()
        self._samples_next = False

    def start(self, lane: str, seq: int) -> None:
        """Begin a training client at a number."""
        self._next[lane] = seq
        self._held.setdefault(lane, {})

    def forget(self, lane: str) -> list[Item]:
        """Return what waits of a training client, which leaves."""
        self._next.pop(lane, None)
        if lane in self._turns:
            self._turns.remove(lane)
        return [*self._held.pop(lane, {}).values()]

    def add(self, lane: str, seq: int, item: Item) -> None:
        """Let a request of a training client wait for its turn."""
        self._held[lane][seq] = item
        if lane not in self._turns:
            self._turns.append(lane)

    def add_sample(self, version: str, item: Item) -> None:
        """Let a request for completions wait."""
        self._samples.setdefault(version, deque()).append(item)

    def withdraw(self, gone: Callable[[Item], bool]) -> list[Item]:
        """Return requests for completions that nobody waits for any more, which leave."""
        found = []
        for version, items in [*self._samples.items()]:
            found += [item for item in items if gone(item)]
            left = deque(item for item in items if not gone(item))
            if left:
                self._samples[version] = left
            else:
                del self._samples[version]
        return found

    def __len__(self) -> int:
        return sum(map(len, self._held.values())) + sum(map(len, self._samples.values()))

    def take(self, most_samples: int) -> tuple[str, list[Item]] | None:
        """Return what is next: a training client and one request of it, or a version and requests for completions. The
        two kinds take turns where both wait. None where nothing can begin.

        most_samples: largest number of requests for completions.
        """
        taken = (self._take_samples(most_samples) if self._samples_next else None) or self._take_training()
        taken = taken or self._take_samples(most_samples)
        if taken is not None:
            self._samples_next = taken[0] in self._next
        return taken

    def _take_training(self) -> tuple[str, list[Item]] | None:
        for _ in range(len(self._turns)):
            lane = self._turns.popleft()
            held, due = self._held[lane], self._next[lane]
            if due in held:
                item = held.pop(due)
                self._next[lane] = due + 1
                if held:
                    self._turns.append(lane)
                return lane, [item]
            self._turns.append(lane)
        return None

    def _take_samples(self, most: int) -> tuple[str, list[Item]] | None:
        if not self._samples or most < 1:
            return None
        version, items = next(iter(self._samples.items()))
        taken = [items.popleft() for _ in range(min(len(items), most))]
        if items:
            self._samples.move_to_end(version)
        else:
            del self._samples[version]
        return version, taken
