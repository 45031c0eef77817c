"""Completions from several servers: many requests at a time, failures survived, continuations joined."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

from isoloss.engine.rl.backends.protocol import Arrived, ignore
from isoloss.engine.rl.backends.servers.fault_counts import Incidents
from isoloss.engine.rl.backends.servers.server import Refused, Server, ServerLost
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.parallel import UserError

FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.1, 5.0
ABORT_EVERY_SECONDS = 0.2


@dataclass
class Fleet:
    """The servers that take part in one call of `generate`, and how busy each is.

    alive: asked of a server that failed a request; False takes it out of the fleet.
    damage: what is wrong with an answer to a request for so many tokens, None for nothing.
    """

    servers: Sequence[Server]
    alive: Callable[[Server], bool]
    damage: Callable[[Completion, int], str | None]
    incidents: Incidents
    losses: list[str] = field(default_factory=list)

    def __post_init__(self):
        self._lock = threading.Lock()
        self._under_way = dict.fromkeys(self.servers, 0)

    def take(self, but: Server | None = None) -> Server | None:
        """The least busy server, `but` only if it is the last; None when all are lost. Give it back with `give`."""
        with self._lock:
            choice = [server for server in self._under_way if server is not but] or list(self._under_way)
            if not choice:
                return None
            server = min(choice, key=self._under_way.__getitem__)
            self._under_way[server] += 1
            return server

    def give(self, server: Server) -> None:
        with self._lock:
            if server in self._under_way:
                self._under_way[server] -= 1

    def failed(self, server: Server, loss: ServerLost) -> None:
        """Take the server out unless it is alive after all."""
        alive = not loss.timed_out and self.alive(server)
        with self._lock:
            self.losses.append(str(loss))
            known = server in self._under_way
            if not alive:
                self._under_way.pop(server, None)
        if known and not alive:
            self.incidents.lost(server)


def generate(
    fleet: Fleet,
    requests: Sequence[Request],
    sampling: Sampling,
    concurrency: int,
    timeout: float,
    aborted: threading.Event,
    abort_all: Callable[[], object],
    arrived: Arrived = ignore,
) -> list[Completion | None]:
    """A completion for each request, in their order; None where all servers were lost.

    concurrency: requests under way at a time, in all.
    timeout: seconds for which a request is tried again after its first failure.
    aborted: once set, what is under way is ended, by abort_all(), and the rest is not begun.
    arrived: told of each completion when it ends by itself, from the thread that waited for it.
    Raises UserError where a server refuses a request, or keeps failing it.
    """

    def one(request: Request) -> Completion | None:
        try:
            completion = complete(fleet, request, sampling, timeout, aborted)
            if completion is not None and completion.finish != "abort":
                arrived(completion)
            return completion
        except UserError:
            aborted.set()  # the others would be thrown away: let them end soon
            raise

    with ThreadPoolExecutor(max_workers=min(concurrency, max(1, len(requests)))) as threads:
        futures = [threads.submit(one, request) for request in requests]
        running = set(futures)
        while running:
            _, running = wait(running, timeout=ABORT_EVERY_SECONDS)
            if running and aborted.is_set():  # again and again: a request on its way to the scheduler is not in it yet
                abort_all()
    return [future.result() for future in futures]


def try_abort(server: Server) -> None:
    """Abort what runs on the server. One that does not answer has nothing to abort, or its requests will show it."""
    with contextlib.suppress(ServerLost):
        server.abort()


def complete(
    fleet: Fleet, request: Request, sampling: Sampling, timeout: float, aborted: threading.Event
) -> Completion | None:
    """One request to its end, over as many calls and servers as it takes."""
    so_far = request.partial or Completion(request.id, (), (), (), "abort")
    failed, deadline, pause = None, None, FIRST_RETRY_SECONDS
    while not aborted.is_set():
        budget = sampling.max_new_tokens - len(so_far.tokens)
        if budget <= 0:
            return replace(so_far, finish="length")
        server = fleet.take(but=failed)
        if server is None:
            return None
        context = [*request.prompt_tokens, *so_far.tokens]
        try:
            continuation = server.generate(request, context, sampling, budget)
            wrong = fleet.damage(continuation, budget)
            if wrong is None and continuation.finish == "abort" and not aborted.is_set():
                wrong = "an abort that nobody here asked for"
            if wrong is not None:
                raise ServerLost(f"{server} answered with {wrong}")
        except Refused as refused:
            raise UserError(
                f"{request.id} of {len(context)} tokens, with at most {budget} to follow, was refused by "
                f"{refused}; shorten the prompt, lower rollout.max_new_tokens, or give the server a longer context"
            ) from None
        except ServerLost as loss:
            fleet.failed(server, loss)
            deadline = time.monotonic() + timeout if deadline is None else deadline
            if time.monotonic() > deadline:
                raise UserError(
                    f"{loss}; request {request.id} was tried for rollout.timeout={timeout:g} seconds: look into the "
                    "server's log"
                ) from None
            fleet.incidents.count("requests_retried")
            aborted.wait(pause)
            failed, pause = server, min(2 * pause, LAST_RETRY_SECONDS)
            continue
        finally:
            fleet.give(server)
        so_far = so_far.followed_by(continuation)
        # A server also stops at the end-of-sequence tokens of its own configuration: go on where they are not ours.
        if so_far.finish != "stop" or so_far.tokens[-1] in sampling.stop_token_ids:
            return so_far
    return replace(so_far, finish="abort")
