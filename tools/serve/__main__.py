"""Serve the Tinker API from your own machine: training and sampling for clients of the tinker SDK and its cookbook.

    isoloss-serve model.path=DIR serve.name=Qwen/Qwen3-8B parallel.tp=2
    export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=$(cat runs/serve/api_key)
    python -m tinker_cookbook.recipes.sl_loop

This process starts the front, which speaks HTTP, and the ranks, and starts both again where one of them ends: the
journal in output_dir has what clients were promised, and their libraries wait.
"""

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence

from isoloss.parallel import UserError
from isoloss.parallel.runtime.console import say
from isoloss.parallel.runtime.processes import Helper
from isoloss.recipes import command_line, launch
from isoloss.tools import command_line as tools_command_line
from isoloss.tools.serve.config import ServeConfig
from isoloss.tools.serve.front import keys

POLL_SECONDS = 0.2
QUICK_SECONDS = 120.0  # a server that ends sooner than this after its start, three times, is given up
TRIES = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM. Return the exit status: 0 then, 2 a mistake of the user, 1 given up."""
    parser = tools_command_line.parser("serve", __doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments, options = parser.parse_known_args(argv)
    words = arguments.overrides
    try:
        command_line.refuse_options(options, words)
        config, *_ = launch.compose_config("serve", ServeConfig, words)
        command_line.refuse_missing_start(config.model.path)
        check_port(config)
        config.folder.mkdir(parents=True, exist_ok=True)
        keys.read(config.serve.api_keys, config.folder)
    except (UserError, OSError) as mistake:
        return tools_command_line.tell_mistake(mistake)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        return supervise(config, words)
    except KeyboardInterrupt:
        return 0


def supervise(config: ServeConfig, words: Sequence[str]) -> int:
    """Keep front and ranks running. Return the exit status of the front or rank that found a mistake, or 1."""
    quick = 0
    while True:
        started = time.monotonic()
        status = run(config, words)
        if status == 2:
            return 2
        quick = quick + 1 if time.monotonic() - started < QUICK_SECONDS else 1
        if quick >= TRIES:
            say(f"isoloss-serve: ended {TRIES} times within {QUICK_SECONDS:g} s of its start: given up", error=True)
            return 1
        say("isoloss-serve: a process ended; starting again from the journal", error=True)


def run(config: ServeConfig, words: Sequence[str]) -> int:
    """Start front and ranks, and return the exit status of the one that ends first, once both have ended."""
    ranks = config.serve.ranks or config.parallel.layout().fewest_ranks
    with tempfile.TemporaryDirectory(prefix="isoloss-serve-") as folder:
        address = os.path.join(folder, "ranks")
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        front = Helper([sys.executable, "-m", "isoloss.tools.serve.front", address, *words], env=environment)
        ranks_command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--standalone"),
            *("-m", "isoloss.tools.serve.ranks", address, *words),
        ]
        helpers = [front, Helper(ranks_command, env=environment)]
        try:
            while True:
                for helper in helpers:
                    if (status := helper.poll()) is not None:
                        return status
                time.sleep(POLL_SECONDS)
        finally:
            for helper in helpers:
                helper.kill()


def check_port(config: ServeConfig) -> None:
    """Raise UserError where the port cannot be had."""
    serve = config.serve
    with socket.socket(socket.AF_INET6 if ":" in serve.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((serve.host, serve.port))
        except OSError as error:
            raise UserError(
                f"serve.host={serve.host} serve.port={serve.port}: {error.strerror}; choose another port"
            ) from None


if __name__ == "__main__":
    sys.exit(main())
