"""An SGLang server that makes tokens with an adapter, and the adapters that the requests of a fleet name."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from isoloss.engine.rl.backends.servers.api_key import ApiKey
from isoloss.engine.rl.backends.servers.server import Refused, ServerLost
from isoloss.engine.rl.backends.sglang.routes import with_routes
from isoloss.engine.rl.backends.sglang.server import SGLangServer, read_reply, request_body
from isoloss.engine.rl.trajectory import Completion, Request, Sampling


@dataclass(frozen=True)
class Named:
    """An adapter on the servers."""

    version: int
    name: str


@dataclass
class InUse:
    """The adapters of a fleet; from any thread.

    current: the adapter that requests name. loaded: the one that a complete update has given to all servers.
    """

    current: Named | None = None
    loaded: Named | None = None
    _requests: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def request(self) -> Iterator[Named]:
        """Yield the adapter that a request is to name, which stays until the request has ended."""
        with self._lock:
            adapter = self.current
            assert adapter is not None, "no server takes requests before an update"
            self._requests[adapter.name] += 1
        try:
            yield adapter
        finally:
            with self._lock:
                self._requests[adapter.name] -= 1

    def serve(self, version: int) -> None:
        """Let requests name the adapter that was loaded as `version`."""
        with self._lock:
            assert self.loaded is not None and self.loaded.version == version
            self.current = self.loaded

    def needed(self) -> set[str]:
        """Return the names that requests have or will have."""
        with self._lock:
            names = {name for name, number in self._requests.items() if number > 0}
            return names if self.current is None else names | {self.current.name}


class AdapterServer(SGLangServer):
    """An SGLang server that makes tokens with an adapter."""

    def __init__(self, url: str, timeout: float, key: ApiKey | None, adapters: InUse):
        super().__init__(url, timeout, key)
        self._adapters = adapters

    def generate(self, request: Request, tokens: Sequence[int], sampling: Sampling, budget: int) -> Completion:
        with self._adapters.request() as adapter:
            body = {**request_body(request, tokens, sampling, budget), "lora_path": adapter.name}
            try:
                reply = self.post("/generate", body)
            except Refused as refused:
                if adapter.name in str(refused):
                    raise ServerLost(f"{self.url} has lost the adapter {adapter.name}: {refused}") from None
                raise
            try:
                completion = read_reply(request.id, reply, adapter.version)
                return with_routes(completion, reply, request, len(tokens), sampling)
            except ServerLost as lost:
                raise ServerLost(f"{self.url}/generate: {lost}") from None

    def weight_version(self) -> int | None:
        """See `Server`: the version of the adapter that requests name, if the server has it, on the model's files."""
        adapter = self._adapters.current
        if adapter is None or super().weight_version() is not None:
            return None
        return adapter.version if adapter.name in self.loaded() else None

    def set_weight_version(self, version: int) -> None:
        """See `Server`: requests of the whole fleet name it."""
        self._adapters.serve(version)

    def loaded(self) -> list[str]:
        """Return the names of adapters that the server has."""
        models = self.get("/v1/models").get("data")
        if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
            raise ServerLost(f"{self.url}/v1/models: an answer without a list of models")
        return [str(model.get("id")) for model in models if model.get("parent") is not None]

    def load(self, name: str, path: str, body: Mapping[str, Any]) -> None:
        """Load an adapter. Raises ServerLost where the server does not say that it has it."""
        reply = self.post(path, {"lora_name": name, **body})
        if reply.get("success") is not True:
            raise ServerLost(f"{self.url}{path}: {name} was not loaded: {reply.get('error_message')}")

    def unload(self, name: str) -> None:
        self.post("/unload_lora_adapter", {"lora_name": name}, answer=False)
