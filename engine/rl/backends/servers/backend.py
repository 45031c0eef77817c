"""A fleet of inference servers as a rollout backend: rank 0 talks to them, the other ranks get the outcome."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from isoloss.engine.instruments import watchdog
from isoloss.engine.rl.backends.protocol import Bucket, Receives, RolloutBackend
from isoloss.engine.rl.backends.servers.api_key import ApiKey, api_key_of
from isoloss.engine.rl.backends.servers.fault_counts import Incidents
from isoloss.engine.rl.backends.servers.generate import Dispatcher, Fleet, try_abort
from isoloss.engine.rl.backends.servers.health import (
    check_alike,
    explain,
    is_healthy,
    serves,
    try_resume,
    try_sleep,
)
from isoloss.engine.rl.backends.servers.life import ServerLife
from isoloss.engine.rl.backends.servers.response_check import damage
from isoloss.engine.rl.backends.servers.server import Server, WeightSync, on_all
from isoloss.engine.rl.config import RolloutConfig
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.parallel import UserError
from isoloss.parallel.rank0 import RankZero

MEMORY = ("weights", "kv_cache")


class ServerBackend(RolloutBackend):
    """A rollout backend on the servers of `config.servers`, which generate while the trainer does something else.

    model: the Hugging Face folder or checkpoint of the policy; its config.json and tokenizer go along with weights on
        disk, and {model} of rollout.server_command is its Hugging Face folder.
    vocab_size: size of the policy's vocabulary: token ids that a server answers with are below it.
    log_folder: folder for the output of servers that are started here.
    server: makes the client of one URL, from it, the seconds that an answer may take, and the servers' key.
    weight_sync: makes the way for weights to reach them.

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
        self.rank0 = RankZero(partial(explain, timeout=config.timeout), watchdog.patient)
        self._sync = weight_sync(config, model, self.rank0.group)
        self.receives: Receives = self._sync.receives
        self.takes_adapter = self._sync.of_adapter
        self._version: int | None = None  # that the last complete update gave to all servers; on every rank
        self._valid_versions: set[int] = set()  # that tokens of requests in flight may have; on rank 0
        self._paused = False
        self._closed = False
        key = api_key_of(config)
        self._servers = [server(url, config.timeout, key) for url in config.servers]
        self._router = server(config.router, config.timeout, key) if config.router else None
        self._incidents = Incidents(self._servers)
        self._keeps_weights = False  # whether colocated servers' weights survive giving back their memory
        options = self._sync.server_options
        self._life = ServerLife(config, model, log_folder, self._servers, self._incidents, key, options)
        self._dispatcher = Dispatcher(
            config.concurrency,
            config.timeout,
            self._find_fleet,
            lambda: on_all(self._servers, try_abort),
            partial(explain, timeout=config.timeout),
        )
        self.rank0.run(self._open)

    # ---- generation -------------------------------------------------------------------------------------------------

    def submit(self, request: Request, sampling: Sampling) -> Future[Completion]:
        """See `RolloutBackend`. Raises UserError for stop strings, which a completion that goes on after an abort or on
        another server could miss."""
        if sampling.stop:
            raise UserError(
                f"{request.id}: stop={list(sampling.stop)} is not for servers: give stop_token_ids, or set "
                "rollout.backend=megatron or rollout.backend=transformers"
            )
        return self._dispatcher.submit(request, sampling)

    def serve(self, goal: Future | None) -> None:
        """See `RolloutBackend`: servers need nobody, so this waits. With rollout.colocated they sleep when nothing is
        in flight any more. One broadcast."""

        def wait_for_goal() -> None:
            assert goal is not None, "this is rank 0"
            wait([goal])
            losses = self._dispatcher.take_losses()
            if losses:
                self._life.insist_on_one(losses)
            else:
                self.sleep(MEMORY)

        self.rank0.run(wait_for_goal)

    def _find_fleet(self) -> Fleet:
        """A server takes part if it serves the version of the last update (behind a router all must)."""
        served = self._life.served_versions()
        ready = [server for server, version in served.items() if version is not None and version == self._version]
        if self._router is not None:
            ready = [self._router] if len(ready) == len(served) else []
        self._valid_versions = {version for version in (self._version,) if version is not None}
        if ready:
            self.wake(MEMORY)

        def wrong(answer: Completion, budget: int, sampling: Sampling) -> str | None:
            return damage(answer, budget, sampling, self._vocab_size, self._valid_versions)

        return Fleet(ready, self._takes_part, wrong, self._incidents)

    def _takes_part(self, server: Server) -> bool:
        """Return whether the server, or every one behind the router, still serves the weights of requests in flight."""
        if server is not self._router:
            return serves(server, self._valid_versions)
        return is_healthy(server) and all(on_all(self._servers, lambda each: serves(each, self._valid_versions)))

    def pause(self) -> None:
        self._paused = True
        on_all(self._servers, lambda server: server.pause())

    def resume(self) -> None:
        self._paused = False
        on_all(self._servers, lambda server: server.resume())

    def abort(self) -> None:
        """See `RolloutBackend`. Requests that a pause keeps from the scheduler come back after `resume`."""
        self._dispatcher.abort()

    # ---- weights ----------------------------------------------------------------------------------------------------

    @watchdog.patiently  # every call of a server has rollout.timeout
    def update_weights(self, buckets: Iterable[Bucket], version: int) -> None:
        """See `RolloutBackend`. Requests in flight stop for it and go on with the new weights; with rollout.colocated
        none may be, and the servers take back the memory of their weights first, and that of their caches when they
        next generate.

        Of an adapter requests in flight neither stop nor change to it, and an update that fails leaves the servers with
        the one before.
        """
        last = self._version
        if not self.takes_adapter:
            self._version = None
        failure: Exception | None = None
        try:  # before a rank takes memory for a bucket, the servers have given theirs
            changed = self.rank0.run(lambda: self._begin_update(last))
        except Exception as error:
            failure, changed = error, True
        if changed:
            self._sync.forget()
        for bucket in buckets:  # to its end in any case: the other ranks take part in making it
            payload = self._sync.prepare(bucket)
            if failure is None:
                failure = self._send(payload)
        if failure is None:
            failure = self.rank0.attempt(lambda: self._end_update(version))
        if failure is not None:
            self._incidents.count("syncs_retried")
            if not self.takes_adapter:
                self._abandon_update()
        failure = self.rank0.agree(failure)
        self._sync.release()
        if failure is not None:
            raise failure
        self._version = version

    def _send(self, payload: Any) -> Exception | None:
        """Send what `prepare` made, from rank 0, or from the rank that has something: all ranks then wait for it, since
        a server that hears of two groups at a time may wait in one of them for another that waits in the second."""

        def send() -> None:
            self._sync.send(self._servers, payload)

        if self.receives != "owner":
            return self.rank0.attempt(send)
        return self.rank0.agree(None if payload is None else self.rank0.attempt_here(send))

    def _begin_update(self, last: int | None) -> bool:
        """Returns whether a server may have left what the last update set up."""
        self._life.come_up(lambda server: server.check_alive())
        # One that was restarted has, and one that an update failed on may be in the middle of something.
        changed = last is None or set(self._life.served_versions().values()) != {last}
        self.sleep(["kv_cache"])  # a server that has just come up has all of its memory
        self.wake(["weights"])
        if self.takes_adapter and self._paused:
            raise ValueError(
                "update_weights() between pause() and resume(): the adapter of paused requests could not be unloaded, "
                "and the next one would wait for that; resume() first"
            )
        if not self.takes_adapter:
            on_all(self._servers, lambda server: server.pause())
            on_all(self._servers, lambda server: server.flush_cache())
            on_all(self._servers, lambda server: server.begin_update())
        self._sync.begin(self._servers)
        return changed

    def _end_update(self, version: int) -> None:
        self._sync.end(self._servers, version)
        if not self.takes_adapter:
            on_all(self._servers, lambda server: server.end_update())
            on_all(self._servers, lambda server: server.flush_cache())
        self._valid_versions.add(version)  # before a token can have it
        # Only now, so that a server never claims a version of which it has a part.
        on_all(self._servers, lambda server: server.set_weight_version(version))
        if not self.takes_adapter and not self._paused:
            on_all(self._servers, lambda server: server.resume())
        wrong = {str(server): found for server, found in self._life.served_versions().items() if found != version}
        if wrong:
            raise UserError(
                f"rollout.servers: weights of version {version} were sent, but what servers say they have is {wrong}; "
                "see that no other run uses them"
            )
        if not self.takes_adapter:
            check_alike(self._servers)
        self._sync.tidy(self._servers)

    def _abandon_update(self) -> None:
        """After a failure: the servers hold a mixture, so what waits for them must end, and not go on with it."""
        self.rank0.attempt(self._dispatcher.abort)
        for undo in (lambda server: server.end_update(), lambda server: server.resume()):
            self.rank0.attempt(lambda undo=undo: on_all(self._servers, undo))

    def weight_version(self) -> int | None:
        """See `RolloutBackend`."""
        versions = self.rank0.run(lambda: set(self._life.served_versions().values()))
        return self._version if versions == {self._version} else None

    # ---- memory of colocated servers --------------------------------------------------------------------------------

    def sleep(self, tags: Sequence[str]) -> None:
        """On rank 0, with rollout.colocated: the servers give back the memory of `tags`, but weights only if those
        survive it (--enable-weights-cpu-backup). Nothing may be in flight. A server that is gone has no memory."""
        if self._config.colocated:
            given = [tag for tag in tags if tag == "kv_cache" or self._keeps_weights]
            on_all(self._servers, lambda server: try_sleep(server, given))

    def wake(self, tags: Sequence[str]) -> None:
        """On rank 0: the servers take back what of `tags` ("weights", "kv_cache") they have given away."""
        on_all(self._servers, lambda server: server.wake(tags))

    # ---- life -------------------------------------------------------------------------------------------------------

    def check_health(self) -> None:
        """See `RolloutBackend`. A server that is ours to restart is restarted; `weight_version` then shows it."""
        self.rank0.run(lambda: self._life.come_up(lambda server: server.check_health()))

    def take_counts(self) -> dict[str, int]:
        """See `RolloutBackend`. All 0 on ranks but 0."""
        return self._incidents.take()

    def close(self) -> None:
        """See `RolloutBackend`. Waits for no other rank: after a crash there may be none that comes."""
        if self._closed:
            return
        self._closed = True
        failure = self.rank0.attempt_here(self._close)
        self.rank0.close()
        if failure is not None:
            raise failure

    def _open(self) -> None:
        on_all(self._servers, try_resume)
        self._life.come_up(lambda server: server.check_health())
        self._incidents.take()  # one that was not there yet was not lost
        self._sync.open(self._servers)
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
        self._dispatcher.close()
        self._sync.close(self._servers)
        for server in (*self._servers, *([self._router] if self._router else ())):
            server.close()
        self._life.stop()
