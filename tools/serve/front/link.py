"""The connection of the front to the ranks: numbered commands, and an outcome for each, over a Unix socket in a folder
that only this user can open. Objects travel pickled, as both ends are processes of one program."""

import asyncio
import itertools
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from typing import Any

from isoloss.tools.serve.commands import Cancel, Command


class Link:
    """The front's end.

    address: path of the socket.
    end: called when the ranks have ended; by default the front ends too, and both start again from the journal.
    """

    def __init__(self, address: str, end: Callable[[], object] = lambda: os._exit(1)):
        self._end = end
        self._listener = Listener(address, "AF_UNIX")
        self._connection: Connection | None = None
        self._numbers = itertools.count()
        self._outcomes: dict[int, asyncio.Future[Any]] = {}

    async def connect(self) -> dict[str, Any]:
        """Wait for the ranks; return what they say of the model."""
        loop = asyncio.get_running_loop()
        self._connection = await loop.run_in_executor(None, self._listener.accept)
        facts = self._outcomes[-1] = loop.create_future()
        threading.Thread(target=self._receive, args=(loop,), daemon=True).start()
        return await facts

    async def call(self, command: Command) -> Any:
        """Carry out a command on the ranks and return its result, or `Failed`.

        Commands begin in the order of the calls. Samples of one version run together; where a call is cancelled, its
        sampling ends.
        """
        connection, number = self._connection, next(self._numbers)
        assert connection is not None, "connect() comes first"
        outcome = self._outcomes[number] = asyncio.get_running_loop().create_future()
        connection.send((number, command))
        try:
            return await outcome
        except asyncio.CancelledError:
            connection.send((number, Cancel("")))
            raise

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._connection is not None
        while True:
            try:
                number, outcome = self._connection.recv()
            except (EOFError, OSError):
                self._end()
                return
            loop.call_soon_threadsafe(self._deliver, number, outcome)

    def _deliver(self, number: int, outcome: Any) -> None:
        waiting = self._outcomes.pop(number)
        if not waiting.done():
            waiting.set_result(outcome)
