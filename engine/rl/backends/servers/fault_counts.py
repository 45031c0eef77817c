"""Count faults of servers that were repaired: metrics of a run (docs/rl.md)."""

import threading
from collections.abc import Iterable

from isoloss.engine.rl.backends.servers.server import Server

NAMES: tuple[str, ...] = ("servers_lost", "servers_returned", "requests_retried", "completions_lost", "syncs_retried")


class Incidents:
    """Counts since they were last taken; from any thread.

    servers: the servers of rollout.servers. Faults of others, such as a router, are not counted.
    """

    def __init__(self, servers: Iterable[Server]):
        self._lock = threading.Lock()
        self._present = set(servers)
        self._absent: set[Server] = set()
        self._counts = dict.fromkeys(NAMES, 0)

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def lost(self, server: Server) -> None:
        """Count a server that does not answer, or has other weights than it was given: once, until it has returned."""
        with self._lock:
            if server in self._present:
                self._present.remove(server)
                self._absent.add(server)
                self._counts["servers_lost"] += 1
        server.had_ours = False  # so that weights which are not ours are not taken for another loss

    def returned(self, server: Server) -> None:
        """Note that a lost server answers again."""
        with self._lock:
            if server in self._absent:
                self._absent.remove(server)
                self._present.add(server)
                self._counts["servers_returned"] += 1

    def take(self) -> dict[str, int]:
        with self._lock:
            taken, self._counts = self._counts, dict.fromkeys(NAMES, 0)
        return taken
