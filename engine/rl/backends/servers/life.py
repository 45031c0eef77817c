"""The life of a run's servers: started, waited for, started again, and asked for the weights that they serve."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from isoloss.engine.rl.backends.servers.api_key import ApiKey
from isoloss.engine.rl.backends.servers.fault_counts import Incidents
from isoloss.engine.rl.backends.servers.health import POLL_SECONDS, Check, is_alive, is_healthy, passes, wait_until
from isoloss.engine.rl.backends.servers.process import ServerProcess
from isoloss.engine.rl.backends.servers.server import Server, ServerLost, on_all
from isoloss.engine.rl.config import RolloutConfig
from isoloss.models.families.registry import hf_folder
from isoloss.parallel import UserError
from isoloss.parallel.rank0 import is_main


class ServerLife:
    """The servers of rollout.servers, and with rollout.server_command their processes.

    options: options that the command is given.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model: str | Path,
        log_folder: str | Path,
        servers: Sequence[Server],
        incidents: Incidents,
        key: ApiKey | None,
        options: Sequence[str] = (),
    ):
        self._timeout, self._servers, self._incidents = config.timeout, servers, incidents
        self._processes: dict[Server, ServerProcess] = {}
        if config.server_command is not None and is_main():
            folder, logs = hf_folder(model).absolute(), Path(log_folder)
            self._processes = {
                server: ServerProcess(config.server_command, server.url, folder, logs, key, options)
                for server in servers
            }

    def stop(self) -> None:
        for process in self._processes.values():
            process.stop()

    def come_up(self, check: Check) -> None:
        """Wait until every server passes the check; servers of this run that do not are started again."""
        self._revive(check)
        # Not for this run's own: one that dies just now would be waited for, and started by nobody.
        others = [server for server in self._servers if server not in self._processes]
        on_all(others, lambda server: wait_until(check, server, self._timeout, self._incidents.lost))
        for server in self._servers:
            self._incidents.returned(server)

    def _revive(self, check: Check) -> None:
        """Start those servers of this run that do not pass the check, and wait for them."""
        dead = [
            server for server, process in self._processes.items() if not process.running or not passes(check, server)
        ]
        for server in dead:
            self._incidents.lost(server)
            self._processes[server].start()
            server.asleep.clear()
        for server in dead:
            try:
                self._processes[server].wait_ready(partial(is_healthy, server), self._timeout)
            except UserError:
                self.stop()
                raise

    def served_versions(self) -> dict[Server, int | None]:
        """Return the version that each server serves; None for weights of somebody else, and for a server that does not
        answer."""

        def served(server: Server) -> int | None:
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

        return dict(zip(self._servers, on_all(self._servers, served)))

    def insist_on_one(self, losses: Sequence[str]) -> None:
        """Raises UserError where nothing can be hoped for: no server comes back, and none is this run's to start.

        losses: why completions were lost.
        """
        deadline = time.monotonic() + self._timeout
        while not self._processes and not any(on_all(self._servers, is_alive)):
            if time.monotonic() > deadline:
                raise UserError(
                    f"rollout.servers={[str(server) for server in self._servers]}: none answers in rollout.timeout="
                    f"{self._timeout:g} seconds ({losses[0]}); start them again, or let rollout.server_command do so"
                )
            time.sleep(POLL_SECONDS)
