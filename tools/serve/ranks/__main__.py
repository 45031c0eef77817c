"""The ranks of a server: they take one command at a time from the front, the same on every rank.

torchrun --nproc_per_node N -m isoloss.tools.serve.ranks SOCKET key=value ...
"""

import json
import shutil
import sys
from collections.abc import Sequence
from multiprocessing.connection import Client
from typing import TYPE_CHECKING

from isoloss.engine.instruments import startup, watchdog
from isoloss.parallel import UserError
from isoloss.parallel.runtime import processes
from isoloss.recipes import launch
from isoloss.tools.serve import commands
from isoloss.tools.serve.config import ServeConfig

if TYPE_CHECKING:
    from isoloss.engine.step.engine import Engine
    from isoloss.tools.serve.ranks.inbox import Inbox, Numbered


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out commands until the front closes the connection. Return the exit status."""
    address, *words = sys.argv[1:] if argv is None else argv
    if argv is None:
        processes.end_with_parent()
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
    from isoloss.tools.serve.ranks.inbox import Inbox
    from isoloss.tools.serve.ranks.servers import VersionServers
    from isoloss.tools.serve.ranks.tenants import Tenants

    engine = Engine(config.of_engine())
    rank0, inbox, keys = RankZero(patient=watchdog.patient), None, config.serve
    servers = VersionServers(keys.sglang_servers, keys.sglang_timeout, keys.concurrency)
    rank0.run(servers.check)
    folder = (config.folder / "sglang").resolve() if keys.sglang_servers else None
    if folder is not None and rank0.here:
        shutil.rmtree(folder, ignore_errors=True)  # of a process that died meanwhile
    tenants = Tenants(engine, keys.concurrency, folder, servers.load, servers.drop)
    if rank0.here:
        inbox = Inbox(Client(address, "AF_UNIX"), servers.sample if keys.sglang_servers else None)
        inbox.send(-1, facts_of(engine))
    while (batch := rank0.run(lambda: _next(inbox))) is not None:
        command, outcomes = batch[0][1], []
        try:
            if isinstance(command, commands.Sample):
                tenants.sampler(command.version).sample(inbox, batch[0])
            elif isinstance(command, commands.Score):
                outcomes = tenants.sampler(command.version).scores(
                    [each for _, each in batch if isinstance(each, commands.Score)]
                )
            else:
                outcomes = [tenants.run(command)]
        except UserError as error:
            outcomes = [commands.Failed(str(error))] * len(batch)
        if inbox is not None:
            for (number, _), outcome in zip(batch, outcomes):
                inbox.send(number, outcome)


def facts_of(engine: "Engine") -> dict[str, object]:
    """Return what the front has to know of the model."""
    from isoloss.engine.data.chat import load_tokenizer
    from isoloss.engine.rl.prompts import stop_tokens

    folder = engine.source.path
    return {
        "arch": json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"],
        "max_positions": engine.arch.max_positions,
        "vocab_size": engine.arch.vocab_size,
        "stop_token_ids": stop_tokens(folder, load_tokenizer(str(folder), engine.arch.vocab_size)),
    }


def _next(inbox: "Inbox | None") -> "list[Numbered] | None":
    assert inbox is not None, "the first rank has the connection"
    return inbox.next()


if __name__ == "__main__":
    sys.exit(main())
