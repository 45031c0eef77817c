"""SGLang servers that sample for clients, with the adapter of each version under a name of its own.

Versions reach them as PEFT's folders, so that servers need a file system that the first rank shares.
"""

import itertools
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

from isoloss.engine.rl.backends.servers.server import Refused, ServerLost, on_all
from isoloss.engine.rl.backends.sglang.adapter_server import AdapterServer, InUse
from isoloss.engine.rl.backends.sglang.server import read_reply, request_body
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.parallel import UserError
from isoloss.tools.serve.commands import BASE, Sample
from isoloss.tools.serve.ranks.sampler import requests_of, rules_of

OURS = 0  # the version under which a completion of any adapter is read: the model's own weights stay the server's


class VersionServers:
    """Servers of one model. Lives on rank 0.

    urls: addresses. seconds: time that a completion may take. concurrency: largest number of requests at a time.
    """

    def __init__(self, urls: Sequence[str], seconds: float, concurrency: int):
        self._servers = [AdapterServer(url, seconds, None, InUse()) for url in urls]
        self._turns = itertools.count()
        self._threads = ThreadPoolExecutor(concurrency)

    def check(self) -> None:
        """Raise UserError where a server does not answer."""
        for server in self._servers:
            try:
                server.check_alive()
            except (ServerLost, Refused) as error:
                raise UserError(
                    f"serve.sglang_servers: {server.url} does not answer: {error}; start it with the model of "
                    "model.path and --enable-lora, then this server"
                ) from None

    def load(self, version: str, folder: Path) -> None:
        """Give a version to every server, and delete its folder. Raises UserError."""
        name = name_of(version)

        def load(server: AdapterServer) -> None:
            if name in server.loaded():  # of an earlier start
                server.unload(name)
            server.load(name, "/load_lora_adapter", {"lora_path": str(folder)})

        try:
            on_all(self._servers, load)
        except (ServerLost, Refused) as error:
            raise UserError(f"SGLang does not take the adapter: {error}") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def drop(self, version: str) -> None:
        """Let every server forget a version; one that is lost has forgotten it."""
        for server in self._servers:
            try:
                server.unload(name_of(version))
            except (ServerLost, Refused):
                continue

    def sample(self, command: Sample) -> list[Future[Completion]]:
        """Begin to sample, from any thread. The futures raise UserError where no server has an answer."""
        sampling, requests = rules_of(command.request), requests_of(command.request)
        return [self._threads.submit(self._generate, command.version, request, sampling) for request in requests]

    def _generate(self, version: str, request: Request, sampling: Sampling) -> Completion:
        body = body_of(request, sampling, None if version == BASE else name_of(version))
        failures, first = [], next(self._turns)
        for k in range(len(self._servers)):
            server = self._servers[(first + k) % len(self._servers)]
            try:
                return read_reply(request.id, server.post("/generate", body), OURS)
            except (ServerLost, Refused) as error:
                failures.append(f"{server.url}: {error}")
        raise UserError(f"SGLang gave no completion: {'; '.join(failures)}")


def body_of(request: Request, sampling: Sampling, adapter: str | None) -> dict[str, Any]:
    """Return the body of /generate for an adapter, or the model without one."""
    body = request_body(request, request.prompt_tokens, sampling, sampling.max_new_tokens)
    if sampling.stop:
        body["sampling_params"]["stop"] = list(sampling.stop)
    return body if adapter is None else {**body, "lora_path": adapter}


def name_of(version: str) -> str:
    """Return the name of a version on servers."""
    return f"isoloss-{sha256(version.encode()).hexdigest()[:24]}"
