"""A fleet of inference servers as a rollout backend: rank 0 talks to them, the other ranks hear of it."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from isoloss.engine import watchdog
from isoloss.engine.rank0 import RankZero
from isoloss.engine.rl.backends.protocol import Arrived, Bucket, Receives, unnoticed
from isoloss.engine.rl.backends.servers.answers import damage
from isoloss.engine.rl.backends.servers.api_key import ApiKey, api_key_of
from isoloss.engine.rl.backends.servers.generate import Fleet, generate, try_abort
from isoloss.engine.rl.backends.servers.health import (
    POLL_SECONDS,
    Check,
    check_alike,
    explain,
    is_alive,
    is_healthy,
    passes,
    serves,
    try_resume,
    try_sleep,
    wait_until,
)
from isoloss.engine.rl.backends.servers.incidents import Incidents
from isoloss.engine.rl.backends.servers.process import ServerProcess
from isoloss.engine.rl.backends.servers.server import Server, ServerLost, WeightSync, on_all
from isoloss.engine.rl.config import RolloutConfig
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.models.families.registry import hf_folder
from isoloss.parallel import UserError

MEMORY = ("weights", "kv_cache")


def outlines(completions: Sequence[Completion | None]) -> list[Completion | None]:
    return [completion and completion.outline() for completion in completions]


class ServerBackend:
    """A `BesideTraining` backend on the servers of `config.servers`.

    model: the Hugging Face folder or checkpoint of the policy; its config.json and tokenizer go along with weights on
        disk, and {model} of rollout.server_command is its Hugging Face folder.
    vocab_size: of the policy: token ids that a server answers with are below it.
    log_folder: where the output of servers that are started here goes.
    server: makes the client of one URL, from it, the seconds that an answer may take, and the servers' key.
    weight_sync: makes what brings weights to them.

    Collective over the world: servers are waited for, with rollout.server_command after they were started. Raises
    UserError for servers that do not come up in rollout.timeout, or do not fit the configuration.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model: str | Path,
        vocab_size: int,
        log_folder: str | Path,
        server: Callable[[str, float, ApiKey | None], Server],
        weight_sync: Callable[[RolloutConfig, str | Path, dist.ProcessGroup], WeightSync],
    ):
        self._config = config
        self._vocab_size = vocab_size
        self._rank0 = RankZero(partial(explain, timeout=config.timeout), watchdog.patient)
        self._sync = weight_sync(config, model, self._rank0.group)
        self.receives: Receives = self._sync.receives
        self._version: int | None = None  # that the last complete update gave to all servers; on every rank
        self._of_batch: set[int] = set()  # versions that tokens of the present batch may have; on rank 0
        self._aborted = threading.Event()
        self._paused = False
        self._closed = False
        key = api_key_of(config)
        self._servers = [server(url, config.timeout, key) for url in config.servers]
        self._router = server(config.router, config.timeout, key) if config.router else None
        self._incidents = Incidents(self._servers)
        self._keeps_weights = False  # whether colocated servers' weights survive giving back their memory
        self._processes: dict[Server, ServerProcess] = {}
        if config.server_command is not None and self._rank0.here:
            folder, logs = hf_folder(model).absolute(), Path(log_folder)
            self._processes = {
                each: ServerProcess(config.server_command, each.url, folder, logs, key) for each in self._servers
            }
        self._rank0.run(self._open)

    # ---- generation -------------------------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived = unnoticed
    ) -> list[Completion | None]:
        """See `RolloutBackend`. A server takes part if it serves the version of the last update (behind a router all
        must); with none that does, every completion is None."""
        self._aborted.clear()
        return self._rank0.run(lambda: self._generate(requests, sampling, arrived), outlines)

    def begin(
        self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived
    ) -> Future[Sequence[Completion | None]]:
        """See `BesideTraining`."""
        self._aborted.clear()
        result: Future[Sequence[Completion | None]] = Future()

        def generate() -> None:
            try:
                result.set_result(self._generate(requests, sampling, arrived))
            except Exception as error:
                result.set_exception(explain(error, self._config.timeout))

        threading.Thread(target=generate, daemon=True).start()
        return result

    def _generate(self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived) -> list[Completion | None]:
        served = self._served_versions()
        ready = [server for server, version in served.items() if version is not None and version == self._version]
        if not ready or (self._router is not None and len(ready) < len(served)):
            self._incidents.count("completions_lost", len(requests))
            self._insist_on_one([])
            return [None] * len(requests)
        self._of_batch = {version for version in (self._version,) if version is not None}
        self.wake(MEMORY)
        fleet = Fleet(
            ready if self._router is None else [self._router],
            self._takes_part,
            lambda answer, budget: damage(answer, budget, sampling, self._vocab_size, self._of_batch),
            self._incidents,
        )
        limits = self._config.concurrency, self._config.timeout
        completions = generate(fleet, requests, sampling, *limits, self._aborted, self._abort_all, arrived)
        if None in completions:
            self._incidents.count("completions_lost", completions.count(None))
            self._insist_on_one(fleet.losses)
        else:
            self.sleep(MEMORY)
        return completions

    def _takes_part(self, server: Server) -> bool:
        """Whether the server, or all that are behind the router, still serve the weights of the batch."""
        if server is not self._router:
            return serves(server, self._of_batch)
        return is_healthy(server) and all(on_all(self._servers, lambda each: serves(each, self._of_batch)))

    def pause(self) -> None:
        self._paused = True
        on_all(self._servers, lambda server: server.pause())

    def resume(self) -> None:
        self._paused = False
        on_all(self._servers, lambda server: server.resume())

    def abort(self) -> None:
        """See `RolloutBackend`. What a pause keeps from the scheduler comes back after `resume`."""
        self._aborted.set()
        self._abort_all()

    def _abort_all(self) -> None:
        on_all(self._servers, try_abort)

    # ---- weights ----------------------------------------------------------------------------------------------------

    @watchdog.patiently  # every call of a server has rollout.timeout
    def update_weights(self, buckets: Iterable[Bucket], version: int) -> None:
        """See `RolloutBackend`. Requests under way stop for it and go on with the new weights; with rollout.colocated
        none may be, and the servers take back the memory of their weights first, and that of their caches when they
        next generate."""
        last, self._version = self._version, None
        failure: Exception | None = None
        try:  # before a rank takes memory for a bucket, the servers have given theirs
            changed = self._rank0.run(lambda: self._begin_update(last))
        except Exception as error:
            failure, changed = error, True
        if changed:
            self._sync.forget()
        for bucket in buckets:  # to its end in any case: the other ranks take part in making it
            payload = self._sync.prepare(bucket)
            if failure is None:
                failure = self._send(payload)
        if failure is None:
            failure = self._rank0.attempt(lambda: self._end_update(version))
        if failure is not None:
            self._incidents.count("syncs_retried")
            self._abandon_update()
        failure = self._rank0.agree(failure)
        self._sync.release()
        if failure is not None:
            raise failure
        self._version = version

    def _send(self, payload: Any) -> Exception | None:
        """Send what `prepare` made, from rank 0, or from the rank that has something: all ranks then wait for it, since
        a server that hears of two groups at a time may wait in one of them for another that waits in the second."""

        def send() -> None:
            self._sync.send(self._servers, payload)

        if self.receives != "its holder":
            return self._rank0.attempt(send)
        return self._rank0.agree(None if payload is None else self._rank0.attempt_here(send))

    def _begin_update(self, last: int | None) -> bool:
        """Returns whether a server may have left what the last update set up."""
        self._come_up(lambda server: server.check_alive())
        # One that was restarted has, and one that an update failed on may be in the middle of something.
        changed = last is None or set(self._served_versions().values()) != {last}
        self.sleep(["kv_cache"])  # a server that has just come up has all of its memory
        self.wake(["weights"])
        on_all(self._servers, lambda server: server.pause())
        on_all(self._servers, lambda server: server.flush_cache())
        on_all(self._servers, lambda server: server.begin_update())
        self._sync.begin(self._servers)
        return changed

    def _end_update(self, version: int) -> None:
        self._sync.end(self._servers)
        on_all(self._servers, lambda server: server.end_update())
        on_all(self._servers, lambda server: server.flush_cache())
        self._of_batch.add(version)  # before a token can have it
        # Only now, so that a server never claims a version of which it has a part.
        on_all(self._servers, lambda server: server.set_weight_version(version))
        if not self._paused:
            on_all(self._servers, lambda server: server.resume())
        wrong = {str(server): found for server, found in self._served_versions().items() if found != version}
        if wrong:
            raise UserError(
                f"rollout.servers: weights of version {version} were sent, but what servers say they have is {wrong}; "
                "see that no other run uses them"
            )
        check_alike(self._servers)

    def _abandon_update(self) -> None:
        """After a failure: the servers hold a mixture, so what waits for them must end, and not go on with it."""
        self._aborted.set()
        for undo in (try_abort, lambda server: server.end_update(), lambda server: server.resume()):
            self._rank0.attempt(lambda undo=undo: on_all(self._servers, undo))

    def weight_version(self) -> int | None:
        """See `RolloutBackend`."""
        versions = self._rank0.run(lambda: set(self._served_versions().values()))
        return self._version if versions == {self._version} else None

    # ---- memory of colocated servers --------------------------------------------------------------------------------

    def sleep(self, tags: Sequence[str]) -> None:
        """On rank 0, with rollout.colocated: the servers give back the memory of `tags`, but weights only if those
        survive it (--enable-weights-cpu-backup). Nothing may be under way. A server that is gone has no memory."""
        if self._config.colocated:
            given = [tag for tag in tags if tag == "kv_cache" or self._keeps_weights]
            on_all(self._servers, lambda server: try_sleep(server, given))

    def wake(self, tags: Sequence[str]) -> None:
        """On rank 0: the servers take back what of `tags` ("weights", "kv_cache") they have given away."""
        on_all(self._servers, lambda server: server.wake(tags))

    # ---- life -------------------------------------------------------------------------------------------------------

    def check_health(self) -> None:
        """See `RolloutBackend`. A server that is ours to restart is restarted; `weight_version` then shows it."""
        self._rank0.run(lambda: self._come_up(lambda server: server.check_health()))

    def take_counts(self) -> dict[str, int]:
        """See `RolloutBackend`. All 0 on ranks but 0."""
        return self._incidents.take()

    def close(self) -> None:
        """See `RolloutBackend`. Waits for no other rank: after a crash there may be none that comes."""
        if self._closed:
            return
        self._closed = True
        failure = self._rank0.attempt_here(self._close)
        self._rank0.close()
        if failure is not None:
            raise failure

    def _open(self) -> None:
        on_all(self._servers, try_resume)
        self._come_up(lambda server: server.check_health())
        self._incidents.take()  # one that was not there yet was not lost
        if not self._config.colocated:
            return
        infos = on_all(self._servers, lambda server: server.info())
        for server, info in zip(self._servers, infos):
            if not info.gives_memory_back:
                raise UserError(
                    f"rollout.colocated=true needs servers that give memory back: start {server} with "
                    f"{server.memory_options}"
                )
        self._keeps_weights = all(info.keeps_weights for info in infos)
        self.sleep(MEMORY)

    def _close(self) -> None:
        self._sync.close(self._servers)
        for server in (*self._servers, *([self._router] if self._router else ())):
            server.close()
        self._stop_processes()

    def _stop_processes(self) -> None:
        for process in self._processes.values():
            process.stop()

    def _come_up(self, check: Check) -> None:
        self._revive(check)
        # Not for ours: one that dies just now would be waited for, and started by nobody.
        others = [server for server in self._servers if server not in self._processes]
        on_all(others, lambda server: wait_until(check, server, self._config.timeout, self._incidents.lost))
        for server in self._servers:
            self._incidents.returned(server)

    def _revive(self, check: Check) -> None:
        """Start those servers of ours that do not pass the check, and wait for them."""
        dead = [
            server for server, process in self._processes.items() if not process.running or not passes(check, server)
        ]
        for server in dead:
            self._incidents.lost(server)
            self._processes[server].start()
            server.asleep.clear()
        for server in dead:
            try:
                self._processes[server].wait_ready(partial(is_healthy, server), self._config.timeout)
            except UserError:
                self._stop_processes()
                raise

    def _served_versions(self) -> dict[Server, int | None]:
        """What each server serves; None for weights that are not ours, and for a server that does not answer."""

        def of(server: Server) -> int | None:
            try:
                version, lost = server.weight_version(), False
            except ServerLost:
                version, lost = None, True
            if not lost:
                self._incidents.returned(server)
            if lost or (version is None and server.had_ours):
                server.asleep.clear()  # whatever comes up there has all of its memory
                self._incidents.lost(server)
            server.had_ours = version is not None
            return version

        return dict(zip(self._servers, on_all(self._servers, of)))

    def _insist_on_one(self, losses: list[str]) -> None:
        """UserError where nothing can be hoped for: no server comes back, and none is ours to restart."""
        deadline = time.monotonic() + self._config.timeout
        while not self._processes and not any(on_all(self._servers, is_alive)):
            if time.monotonic() > deadline:
                tried = f" ({losses[0]})" if losses else ""
                raise UserError(
                    f"rollout.servers={[str(server) for server in self._servers]}: none answers in rollout.timeout="
                    f"{self._config.timeout:g} seconds{tried}; start them again, or let rollout.server_command do so"
                )
            time.sleep(POLL_SECONDS)
