"""Check that servers answer, serve weights of the trainer, and agree with each other."""

import contextlib
import time
from collections.abc import Callable, Collection, Sequence

from isoloss.engine.rl.backends.servers.server import Refused, Server, ServerLost, on_all
from isoloss.parallel import UserError
from isoloss.parallel.runtime.console import Wait, say

POLL_SECONDS = 1.0

Check = Callable[[Server], None]  # raises ServerLost


def wait_until(check: Check, server: Server, timeout: float, lost: Callable[[Server], object]) -> None:
    """Wait until the server passes; it may still be loading, or its owner may restart it. Raise UserError after
    `timeout` seconds.

    lost: callback for a server that does not pass at once.
    """
    deadline, announced = time.monotonic() + timeout, False
    with Wait(f"waiting for {server}", timeout) as wait:
        while True:
            try:
                return check(server)
            except ServerLost as why:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"rollout.servers: {why}, for rollout.timeout={timeout:g} seconds; start a server there, "
                        "correct the URL, or let rollout.server_command start one"
                    ) from None
                if not announced:
                    say(f"waiting for a server: {why}")
                    lost(server)
                announced = True
            wait.look()
            time.sleep(POLL_SECONDS)


def check_alike(servers: Sequence[Server]) -> None:
    """UserError where two servers that divide the model in the same way have different weights."""
    if len(servers) == 1:
        return
    # An old server refuses: it has no checksums.
    with contextlib.suppress(Refused):
        first: dict[int, tuple[Server, list[dict[str, str]]]] = {}
        for server, ranks in zip(servers, on_all(servers, lambda server: server.checksums())):
            other, same = first.setdefault(len(ranks), (server, ranks))
            for mine, theirs in zip(ranks, same):
                different = [name for name, checksum in mine.items() if theirs.get(name) != checksum]
                if different:
                    raise UserError(
                        f"rollout.servers: after an update {server} and {other} differ in {len(different)} weights, "
                        f"the first of them {different[0]}; start them from the same model, with the same options"
                    )


def passes(check: Check, server: Server) -> bool:
    try:
        check(server)
    except ServerLost:
        return False
    return True


def is_alive(server: Server) -> bool:
    return passes(lambda server: server.check_alive(), server)


def is_healthy(server: Server) -> bool:
    return passes(lambda server: server.check_health(), server)


def try_resume(server: Server) -> None:
    """Undo the pause of a run that was killed before it could: SGLang calls a paused server unhealthy."""
    with contextlib.suppress(ServerLost):
        server.resume()


def try_sleep(server: Server, tags: Sequence[str]) -> None:
    with contextlib.suppress(ServerLost):
        server.sleep(tags)


def serves(server: Server, versions: Collection[int]) -> bool:
    """Return whether the server answers, with weights of one of these versions."""
    try:
        return server.weight_version() in versions
    except ServerLost:
        return False


def explain(error: Exception, timeout: float) -> Exception:
    """Return the exception that the user sees: failures of servers are the user's to fix."""
    if isinstance(error, ServerLost):
        return UserError(
            f"{error}; see that the server runs and can be reached, and that rollout.timeout={timeout:g} seconds is "
            "long enough for it"
        )
    if isinstance(error, Refused):
        return UserError(f"{error}; see in the log of that server of rollout.servers what it lacks")
    return error
