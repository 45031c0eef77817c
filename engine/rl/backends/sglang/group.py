"""A process group of this process and those of SGLang servers, formed and used from both sides at once."""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName

from isoloss.engine.rl.backends.servers.server import Server

REASON_SECONDS = 5.0  # for a server's answer, once this side knows that something went wrong


def new_group(backend: str, store: dist.Store, world: int, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Rank 0 of a group beyond the default one, as SGLang makes it (`init_custom_process_group` in its
    srt/utils/common.py): torch has no public call for that."""
    c10d = dist.distributed_c10d
    group, _ = c10d._new_process_group_helper(
        world, 0, [], c10d.Backend(backend), c10d.PrefixStore(name, store), group_name=GroupName(name), timeout=timeout
    )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    return group


def together(servers: Sequence[Server], call: Callable[[Server], Any], here: Callable[[], None]) -> None:
    """call(server) for every server while `here` runs in this process; both sides wait for each other inside.

    Raises soon after one side fails: the other is then left to end by its own time limit. What a server says comes
    first, since this side can only say that nobody came.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def here_on_device() -> None:
        if device is not None:
            torch.cuda.set_device(device)  # every thread begins on device 0
        here()

    threads = ThreadPoolExecutor(max_workers=len(servers) + 1)
    asked: list[Future] = [threads.submit(call, server) for server in servers]
    done = threads.submit(here_on_device)
    wait([*asked, done], return_when=FIRST_EXCEPTION)
    threads.shutdown(wait=False)
    if done.done() and done.exception() is not None:
        wait(asked, timeout=REASON_SECONDS, return_when=FIRST_EXCEPTION)
    for future in (*asked, done):
        if future.done():
            future.result()


def own_address(url: str) -> str:
    """The address under which the server at `url` can reach this machine: that of our side of a way to it."""
    return _addresses(url)[0]


def is_here(url: str) -> bool:
    """Return whether the server at `url` is on this machine: both sides of a way to it then have one address."""
    own, other = _addresses(url)
    return own == other


def _addresses(url: str) -> tuple[str, str]:
    """Return the addresses of both sides of a way from here to the server at `url`."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((parts.hostname or "localhost", parts.port or 80))  # of a datagram socket: sends nothing
        return way.getsockname()[0], way.getpeername()[0]
