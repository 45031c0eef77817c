"""The ranks of a server: they take one command at a time from the front, the same on every rank.

torchrun --nproc_per_node N -m isoloss.tools.serve.worker SOCKET key=value ...
"""

import sys
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING

from isoloss.engine.instruments import startup, watchdog
from isoloss.parallel import UserError
from isoloss.recipes import launch
from isoloss.tools.serve.commands import Command, Failed
from isoloss.tools.serve.config import ServeConfig

if TYPE_CHECKING:
    from isoloss.engine.step.engine import Engine


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out commands until the front closes the connection. Return the exit status."""
    address, *words = sys.argv[1:] if argv is None else argv
    try:
        config, *_ = launch.compose_config("serve", ServeConfig, words)
        startup.prepare(config)
        serve(address, config)
    except UserError as mistake:
        launch.print_error_once(str(mistake))
        return 2
    return 0


def serve(address: str, config: ServeConfig) -> None:
    """Carry out commands. Collective over the world."""
    from isoloss.engine.step.engine import Engine
    from isoloss.parallel.rank0 import RankZero
    from isoloss.tools.serve.tenants import Tenants

    engine = Engine(config.of_engine())
    tenants = Tenants(engine, config.serve.concurrency)
    rank0 = RankZero(patient=watchdog.patient)
    connection = Client(address, "AF_UNIX") if rank0.here else None
    if connection is not None:
        connection.send(facts_of(engine))
    while True:
        command = rank0.run(lambda: _next(connection))
        if command is None:
            return
        try:
            outcome = tenants.run(command)
        except UserError as error:
            outcome = Failed(str(error))
        if connection is not None:
            connection.send(outcome)


def facts_of(engine: "Engine") -> dict[str, object]:
    """Return what the front has to know of the model."""
    from isoloss.engine.data.chat import load_tokenizer
    from isoloss.engine.rl.prompts import stop_tokens

    folder = engine.source.path
    return {
        "max_positions": engine.arch.max_positions,
        "vocab_size": engine.arch.vocab_size,
        "stop_token_ids": stop_tokens(folder, load_tokenizer(str(folder), engine.arch.vocab_size)),
    }


def _next(connection: Connection | None) -> Command | None:
    assert connection is not None, "the first rank holds the connection"
    try:
        return connection.recv()
    except EOFError:
        return None


if __name__ == "__main__":
    sys.exit(main())
