"""A server process that belongs to this run: started, watched, started again, and never left behind."""

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from isoloss.engine.rl.backends.servers.api_key import ApiKey
from isoloss.parallel import UserError
from isoloss.parallel.runtime import environment
from isoloss.parallel.runtime.console import Wait, say
from isoloss.parallel.runtime.processes import Helper

POLL_SECONDS = 0.2
LOG_LINES = 5
GUARD = Path(__file__).with_name("reaper.py")


class ServerProcess:
    """`command` (rollout.server_command, with {model}, {host} and {port}) run for one URL.

    What it prints goes to `<log_folder>/server-<port>.log`, but for the key: SGLang prints its options, --api-key
    among them. Raises UserError where the command cannot be made out.

    options: options behind the command, unless it has the first of them.
    """

    def __init__(
        self,
        command: str,
        url: str,
        model: Path,
        log_folder: Path,
        key: ApiKey | None = None,
        options: Sequence[str] = (),
    ):
        where = urlsplit(url)
        if where.port is None:
            raise UserError(f"rollout.servers={url!r} must name a port for rollout.server_command to serve on")
        try:
            self._command = [
                word.format(model=model, host=where.hostname, port=where.port) for word in shlex.split(command)
            ]
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"rollout.server_command={command!r} cannot be read ({error}); placeholders are {{model}}, {{host}} "
                "and {port}, other braces are written twice"
            ) from None
        if options and options[0] not in self._command:
            self._command += options
        self.url = url
        self._hides = [] if key is None else ["--hide", key.variable]
        self.log = log_folder / f"server-{where.port}.log"
        self._process: Helper | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Run the command, whether it ever ran before or not; `wait_ready` returns when it serves."""
        self.stop()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab", buffering=0) as log:
            command = [sys.executable, "-IS", GUARD, *self._hides, *self._command]
            self._process = Helper(command, stdout=log.fileno(), env=environment.of_other_programs())

    def wait_ready(self, ready: Callable[[], bool], timeout: float) -> None:
        """Wait until ready(). Raises UserError with the end of the log if the command ends first, or takes too long.

        It may end once, and is then started again: a server that is killed while it starts is nobody's mistake. No
        status distinguishes the two: SGLang kills itself whatever is wrong.
        """
        deadline, again = time.monotonic() + timeout, True
        with Wait(f"starting the server for {self.url}", timeout) as wait:
            while not ready():
                if not self.running:
                    if not again:
                        raise UserError(
                            f"rollout.server_command: the server for {self.url} ended twice: {self._told()}"
                        )
                    say(f"the server for {self.url} ended before it served: started once more")
                    self.start()
                    again = False
                if time.monotonic() > deadline:
                    raise UserError(
                        f"rollout.server_command: the server for {self.url} does not answer after "
                        f"rollout.timeout={timeout:g} seconds: {self._told()}"
                    )
                wait.look()
                time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Kill the command and its descendants."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _told(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = [line.strip() for line in lines if line.strip()][-LOG_LINES:]
        return f"fix what its log {self.log} tells, which ends with: {' | '.join(last)}"
