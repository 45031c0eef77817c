"""Ports for servers that a test starts."""

import random
import socket

# Below those that the system gives to connections: one of these could have the port before the server does.
FIRST, LAST = 20000, 32000


def free_port() -> int:
    """Of this machine, on all its addresses; another one at every call, most likely."""
    while True:
        port = random.SystemRandom().randint(FIRST, LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
