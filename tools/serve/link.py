"""The connection of the front to the ranks: one command at a time, one outcome each, over a Unix socket in a folder
that only this user can open. Objects travel pickled, as both ends are processes of one program."""

import asyncio
import os
from multiprocessing.connection import Connection, Listener
from typing import Any

from isoloss.tools.serve.commands import Command


class Link:
    """The front's end. address: path of the socket.

    A rank that ends takes the front with it: both start again from the journal.
    """

    def __init__(self, address: str):
        self._listener = Listener(address, "AF_UNIX")
        self._connection: Connection | None = None

    async def connect(self) -> dict[str, Any]:
        """Wait for the ranks; return what they say of the model."""
        loop = asyncio.get_running_loop()
        self._connection = await loop.run_in_executor(None, self._listener.accept)
        return await loop.run_in_executor(None, self._receive)

    async def call(self, command: Command) -> Any:
        """Carry out a command on the ranks and return its result, or `Failed`."""
        return await asyncio.get_running_loop().run_in_executor(None, self._call, command)

    def _call(self, command: Command) -> Any:
        assert self._connection is not None, "connect() comes first"
        self._connection.send(command)
        return self._receive()

    def _receive(self) -> Any:
        assert self._connection is not None
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            os._exit(1)  # the supervisor starts both again
