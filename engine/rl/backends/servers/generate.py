"""Completions from several servers: many requests at a time, failures survived, continuations joined."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from isoloss.engine.rl.backends.protocol import CompletionLost
from isoloss.engine.rl.backends.servers.fault_counts import Incidents
from isoloss.engine.rl.backends.servers.server import Refused, Server, ServerLost
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.parallel import UserError

FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.1, 5.0
ABORT_EVERY_SECONDS = 0.2
CLOSE_SECONDS = 5.0  # for servers to let go of requests in flight when a run ends


@dataclass
class Fleet:
    """The servers that requests in flight together are sent to, and how busy each is.

    alive: asked of a server that failed a request; False takes it out of the fleet.
    damage: describes what is wrong with an answer, given the tokens that were left and the sampling; None for nothing.
    """

    servers: Sequence[Server]
    alive: Callable[[Server], bool]
    damage: Callable[[Completion, int, Sampling], str | None]
    incidents: Incidents
    losses: list[str] = field(default_factory=list)

    def __post_init__(self):
        self._lock = threading.Lock()
        self._in_flight = dict.fromkeys(self.servers, 0)

    def take(self, but: Server | None = None) -> Server | None:
        """Return the least busy server, `but` only if it is the last; None when all are lost. `give` gives it back."""
        with self._lock:
            choice = [server for server in self._in_flight if server is not but] or list(self._in_flight)
            if not choice:
                return None
            server = min(choice, key=self._in_flight.__getitem__)
            self._in_flight[server] += 1
            return server

    def give(self, server: Server) -> None:
        with self._lock:
            if server in self._in_flight:
                self._in_flight[server] -= 1

    def failed(self, server: Server, loss: ServerLost) -> None:
        """Take the server out unless it is alive after all."""
        alive = not loss.timed_out and self.alive(server)
        with self._lock:
            self.losses.append(str(loss))
            known = server in self._in_flight
            if not alive:
                self._in_flight.pop(server, None)
        if known and not alive:
            self.incidents.lost(server)


class Round:
    """Requests that are in flight together, from the first to the last, and the fleet that they share.

    aborted: once set, what is in flight ends, and the rest is not begun.
    idle: set when none is left.
    """

    def __init__(self, fleet: Future[Fleet]):
        self.fleet = fleet
        self.aborted, self.idle = threading.Event(), threading.Event()
        self.in_flight = 0


class Dispatcher:
    """Sends requests to servers, at most `concurrency` at a time, whatever thread submits them.

    timeout: seconds for which a request is tried again after its first failure.
    find_fleet: makes the fleet of a round, when its first request begins and the round before has ended.
    abort_all: ends what servers have in flight.
    explain: makes of an exception what the user should see.
    """

    def __init__(
        self,
        concurrency: int,
        timeout: float,
        find_fleet: Callable[[], Fleet],
        abort_all: Callable[[], object],
        explain: Callable[[Exception], Exception],
    ):
        self._timeout, self._find_fleet, self._abort_all, self._explain = timeout, find_fleet, abort_all, explain
        self._threads = ThreadPoolExecutor(max_workers=concurrency)
        self._lock = threading.Lock()
        self._round: Round | None = None
        self._losses: list[str] = []

    def submit(self, request: Request, sampling: Sampling) -> Future[Completion]:
        """See `RolloutBackend`."""
        with self._lock:
            before = self._round
            if before is None or before.aborted.is_set() or before.idle.is_set():
                self._round = Round(self._threads.submit(self._begin, before))
            now = self._round
            assert now is not None
            now.in_flight += 1
            future = self._threads.submit(self._complete, now, request, sampling)
        future.add_done_callback(lambda _: self._ended(now))
        return future

    def abort(self) -> None:
        """End the requests in flight; those that are submitted from now on wait until they have ended."""
        with self._lock:
            now = self._round
        if now is not None and not now.idle.is_set():
            now.aborted.set()
            threading.Thread(target=self._abort_until_idle, args=(now,), daemon=True).start()
        self._abort_all()

    def take_losses(self) -> list[str]:
        """Return why completions were lost since the last call; none while requests are in flight."""
        with self._lock:
            if self._round is not None and not self._round.idle.is_set():
                return []
            losses, self._losses = self._losses, []
        return losses

    def close(self) -> None:
        """Abort what is in flight. What servers do not let go of in CLOSE_SECONDS is left behind."""
        with self._lock:
            now = self._round
        if now is not None and not now.idle.is_set():
            self.abort()
            now.idle.wait(CLOSE_SECONDS)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, before: Round | None) -> Fleet:
        if before is not None:
            before.idle.wait()
        return self._find_fleet()

    def _complete(self, now: Round, request: Request, sampling: Sampling) -> Completion:
        try:
            fleet = now.fleet.result()
            completion = complete(fleet, request, sampling, self._timeout, now.aborted)
        except Exception as error:
            raise self._explain(error) from None
        if completion is None:
            why = fleet.losses[-1] if fleet.losses else "no server serves the weights of the last update"
            with self._lock:
                self._losses.append(why)
            fleet.incidents.count("completions_lost")
            raise CompletionLost(f"{request.id} was lost with its servers: {why}")
        return completion

    def _ended(self, now: Round) -> None:
        with self._lock:
            now.in_flight -= 1
            if now.in_flight == 0:
                now.idle.set()

    def _abort_until_idle(self, now: Round) -> None:
        """Again and again: a request on its way to the scheduler is not in it yet."""
        while not now.idle.wait(ABORT_EVERY_SECONDS):
            self._abort_all()


def try_abort(server: Server) -> None:
    """Abort what runs on the server. One that does not answer has nothing to abort, or its requests will show it."""
    with contextlib.suppress(ServerLost):
        server.abort()


def complete(
    fleet: Fleet, request: Request, sampling: Sampling, timeout: float, aborted: threading.Event
) -> Completion | None:
    """Generate one request to its end, over as many calls and servers as it takes."""
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
            continuation = server.generate(replace(request, partial=so_far), context, sampling, budget)
            wrong = fleet.damage(continuation, budget, sampling)
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
