"""Whether servers are there, serve weights of ours, and agree with each other."""

import contextlib
import time
from collections.abc import Callable, Sequence

from isoloss.engine.rl.sglang.client import Refused, ServerLost, SGLangServer, on_all
from isoloss.parallel import UserError

POLL_SECONDS = 1.0

Check = Callable[[SGLangServer], None]  # raises ServerLost


def wait_until(check: Check, server: SGLangServer, timeout: float) -> None:
    """The server passes; it may still be loading, or be restarted by whoever runs it. UserError after `timeout`
    seconds."""
    deadline, told = time.monotonic() + timeout, False
    while True:
        try:
            return check(server)
        except ServerLost as lost:
            if time.monotonic() > deadline:
                raise UserError(
                    f"rollout.servers: {lost}, for rollout.timeout={timeout:g} seconds; start a server there, correct "
                    "the URL, or let rollout.server_command start one"
                ) from None
            if not told:
                print(f"waiting for a server: {lost}", flush=True)
            told = True
        time.sleep(POLL_SECONDS)


def check_alike(servers: Sequence[SGLangServer]) -> None:
    """UserError where two servers that divide the model in the same way have different weights."""
    if len(servers) == 1:
        return
    # An old server refuses: it has no checksums.
    with contextlib.suppress(Refused):
        first: dict[int, tuple[SGLangServer, list[dict[str, str]]]] = {}
        for server, ranks in zip(servers, on_all(servers, SGLangServer.checksums)):
            other, same = first.setdefault(len(ranks), (server, ranks))
            for mine, theirs in zip(ranks, same):
                different = [name for name, checksum in mine.items() if theirs.get(name) != checksum]
                if different:
                    raise UserError(
                        f"rollout.servers: after an update {server} and {other} differ in {len(different)} weights, "
                        f"the first of them {different[0]}; start them from the same model, with the same options"
                    )


def passes(check: Check, server: SGLangServer) -> bool:
    try:
        check(server)
    except ServerLost:
        return False
    return True


def is_healthy(server: SGLangServer) -> bool:
    return passes(SGLangServer.check_health, server)


def try_resume(server: SGLangServer) -> None:
    """Undo the pause of a run that was killed before it could: a paused server is not healthy to SGLang."""
    with contextlib.suppress(ServerLost):
        server.resume()


def serves_ours(server: SGLangServer) -> bool:
    try:
        return server.weight_version() is not None
    except ServerLost:
        return False


def explain(error: Exception, timeout: float) -> Exception:
    """What the user should see of an exception: servers' failures are his to mend."""
    if isinstance(error, ServerLost):
        return UserError(
            f"{error}; see that the server runs and can be reached, and that rollout.timeout={timeout:g} seconds is "
            "long enough for it"
        )
    if isinstance(error, Refused):
        return UserError(f"{error}; see in the log of that server of rollout.servers what it lacks")
    return error
