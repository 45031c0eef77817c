"""A server behind a network that can be cut: forwards a port to that of a command, which it runs.

    python tests/doubles/partition.py FOLDER 127.0.0.1 30000 COMMAND...

COMMAND holds {port}, for the port where its server is to listen. While there is a file FOLDER/cut
connections are closed and new ones too; while there is FOLDER/silent nothing is forwarded, and nothing is closed. What
was sent meanwhile arrives later.
"""

import asyncio
import contextlib
import sys
from pathlib import Path

BLOCK, POLL_SECONDS = 1 << 16, 0.05
BEHIND = 10000  # of the port of tests/support/runs/ports.py: where no one else listens, most likely


class Network:
    def __init__(self, folder: Path, port: int):
        self.folder, self.port = folder, port

    def is_there(self, trouble: str) -> bool:
        return (self.folder / trouble).exists()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until an end or the network closes it."""
        if not self.is_there("cut"):
            with contextlib.suppress(OSError):
                there, back = await asyncio.open_connection("127.0.0.1", self.port)
                ways = [self.forward(reader, back), self.forward(there, writer), self.until_cut()]
                tasks = [asyncio.create_task(way) for way in ways]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
                back.transport.abort()
        if self.is_there("cut"):
            writer.transport.abort()
        else:
            writer.close()  # once the rest of an answer is sent

    async def forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while block := await source.read(BLOCK):
                while self.is_there("silent"):
                    await asyncio.sleep(POLL_SECONDS)
                target.write(block)
                await target.drain()

    async def until_cut(self) -> None:
        while not self.is_there("cut"):
            await asyncio.sleep(POLL_SECONDS)


async def main(folder: str, host: str, port: str, *command: str) -> int:
    behind = int(port) - BEHIND
    network = Network(Path(folder), behind)
    server = await asyncio.start_server(network.serve, host, int(port))
    async with server:
        program = await asyncio.create_subprocess_exec(*(word.format(port=behind) for word in command))
        return await program.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
