"""The requests of `ServerBackend` to an inference server over HTTP, the ways of weights to it, and their failures."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import httpx2

from isoloss.engine.rl.backends.protocol import Bucket, Receives
from isoloss.engine.rl.backends.servers.answers import Answer, Client, TooLarge
from isoloss.engine.rl.backends.servers.api_key import ApiKey
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.parallel import UserError

CONNECT_SECONDS = 10.0
PROBE_SECONDS = 10.0  # for a question that any living server answers at once

AnyServer = TypeVar("AnyServer", bound="Server")
Result = TypeVar("Result")


class ServerLost(Exception):
    """The server did not answer, or not whole. Another server, or another attempt, may.

    timed_out: it took the whole of rollout.timeout, so that another attempt on it would too.
    """

    def __init__(self, message: str, timed_out: bool = False):
        super().__init__(message)
        self.timed_out = timed_out


class Refused(Exception):
    """The server said no (status 4xx), and would say it again; its reason is in the message."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ServerInfo:
    """Settings that a server was started with.

    tp_size: processes that hold a share of the weights.
    device: "cuda", "cpu" ...
    gives_memory_back: `release_memory` is there.
    keeps_weights: weights survive it.
    release: the version of its software; None where it reports none.
    """

    tp_size: int = 1
    device: str = "cuda"
    gives_memory_back: bool = False
    keeps_weights: bool = False
    release: str | None = None


class Server(ABC):
    """Calls to one server; from any thread. Each raises ServerLost or Refused, and UserError where the server asks for
    another key. A kind of server is a subclass.

    timeout: seconds that an answer may take, in all calls that do not say otherwise.
    key: the key that it asks for, if it does.
    """

    memory_options: ClassVar[str] = ""  # what a server is started with so that it can give its memory back

    def __init__(self, url: str, timeout: float, key: ApiKey | None = None):
        self.url = url.rstrip("/")
        self._key = key
        self._timeout = timeout
        self.asleep: set[str] = set()  # what memory it has given back: "weights", "kv_cache"
        self.had_ours = False  # whether it has served weights of this run since it came up
        self._http = Client(self.url, {} if key is None else {"Authorization": f"Bearer {key.value}"})

    def __repr__(self) -> str:
        return self.url

    def close(self) -> None:
        self._http.close()

    # ---- what every kind does ---------------------------------------------------------------------------------------

    @abstractmethod
    def generate(self, request: Request, tokens: Sequence[int], sampling: Sampling, budget: int) -> Completion:
        """Continue `tokens`, the prompt and what was made of the completion so far, by `budget` tokens at most; the new
        tokens alone, with routes of all tokens that the request's partial completion knows none of."""

    @abstractmethod
    def pause(self) -> None:
        """Stop producing tokens; requests under way wait, and hold no keys and values of the present weights."""

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def abort(self) -> None:
        """End every request under way; one that has not reached the scheduler may escape."""

    @abstractmethod
    def check_alive(self) -> None:
        """Check that the server answers at all, which takes no time."""

    @abstractmethod
    def check_health(self) -> None:
        """Check that the server can make a token; while it is paused or asleep, that it answers at all."""

    @abstractmethod
    def weight_version(self) -> int | None:
        """Return the version that the server says it serves; None if it is not a version of the trainer."""

    @abstractmethod
    def set_weight_version(self, version: int) -> None:
        """Call the weights that are there `version`; requests under way keep the versions of their tokens so far."""

    @abstractmethod
    def flush_cache(self) -> None:
        """Forget keys and values that the present weights made."""

    @abstractmethod
    def begin_update(self) -> None:
        """Before weights travel."""

    @abstractmethod
    def end_update(self) -> None:
        """After they did, or after a failure."""

    def sleep(self, tags: Sequence[str]) -> None:
        """Give back what of `tags` the server still holds: its scheduler dies of a second request to do so."""
        held = [tag for tag in tags if tag not in self.asleep]
        if held:
            self.release_memory(held)
            self.asleep |= set(held)

    def wake(self, tags: Sequence[str]) -> None:
        """Take back what of `tags` the server has given away."""
        released = [tag for tag in tags if tag in self.asleep]
        if released:
            self.resume_memory(released)
            self.asleep -= set(released)

    # ---- what some do -----------------------------------------------------------------------------------------------

    def info(self) -> ServerInfo:
        return ServerInfo()

    def checksums(self) -> list[dict[str, str]]:
        """Return the checksum of each weight, for each process of the server; nothing if the server reports none."""
        return []

    def release_memory(self, tags: Sequence[str]) -> None:
        """Give back the memory of "weights" or "kv_cache", which the server holds."""
        raise NotImplementedError

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Take back what `release_memory` gave."""
        raise NotImplementedError

    # ---- how --------------------------------------------------------------------------------------------------------

    def get(self, path: str, answer: bool = True) -> Any:
        """The parsed reply, a dict, to a question that takes a living server no time."""
        return self._call("GET", path, None, PROBE_SECONDS, answer)

    def post(self, path: str, body: Mapping[str, Any], answer: bool = True) -> Any:
        """The parsed reply, a dict; with answer=False, whatever it is does not matter."""
        return self._call("POST", path, body, self._timeout, answer)

    def _call(self, method: str, path: str, body: Any, timeout: float, answer: bool = True) -> Any:
        try:
            reply = self._http.call(method, path, body, timeout, CONNECT_SECONDS)
        except (httpx2.RequestError, TooLarge) as error:
            timed_out = isinstance(error, httpx2.ReadTimeout)
            what = f"no whole answer in {timeout:g} seconds" if timed_out else str(error) or type(error).__name__
            raise ServerLost(f"{self.url}{path}: {what}", timed_out) from None
        if reply.status in (401, 403):
            raise UserError(self._unauthorized(path, reply))
        if 400 <= reply.status < 500:
            raise Refused(f"{self.url}{path}: {self._message(reply)}", reply.status)
        if not 200 <= reply.status < 300:  # a redirect as well: what stands in front of the server has answered
            raise ServerLost(f"{self.url}{path}: status {reply.status}: {self._message(reply)}")
        if not answer:
            return None
        try:
            parsed = json.loads(reply.body)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            told = self._hidden(reply.text[:80])
            raise ServerLost(f"{self.url}{path}: an answer that is no JSON object: {told!r}")
        return parsed

    def _unauthorized(self, path: str, reply: Answer) -> str:
        if self._key is None:
            key, fix = "null", "set it to the name of an environment variable that holds the server's key"
        else:
            key, fix = self._key.variable, "export the key that this server was started with in that variable"
        told = f"{self.url}{path}: status {reply.status}: {self._message(reply)}"
        return f"rollout.api_key_env={key}: {told}; {fix}"

    def _message(self, reply: Answer) -> str:
        """Return the server's message of an error, on one line: its JSON holds it in one of several places."""
        try:
            body = json.loads(reply.body)
        except (ValueError, RecursionError):
            body = reply.text
        if isinstance(body, dict):
            body = body.get("error") or body
            if isinstance(body, dict):
                body = body.get("message") or body.get("error_message") or body.get("detail") or body
        return " ".join(self._hidden(str(body)).split())[:500]

    def _hidden(self, text: str) -> str:
        return text if self._key is None else self._key.hidden_in(text)


class WeightSync:
    """A way for weights to reach the servers: between `begin_update` and `end_update` of every server, bucket after
    bucket. `open`, `begin`, `end`, `tidy` and, but for receives="owner", `send` are called on rank 0 alone.

    receives: which ranks `prepare` needs the tensors on. Of "owner", the rank that has a bucket sends it too, one
        rank at a time.
    of_adapter: whether an update is one more adapter: servers go on generating, and one that fails leaves them as they
        were. Of others they stop, as their weights are replaced.
    server_options: options that a server has to be started with.
    """

    receives: Receives
    of_adapter: bool = False
    server_options: Sequence[str] = ()

    def open(self, servers: Sequence[Server]) -> None:
        """Before the first update, when the servers have come up. Raises UserError for one that cannot take them."""

    def prepare(self, bucket: Bucket) -> Any:
        """Return the argument of `send` for the bucket of this rank; None for an empty bucket, which "owner" does not
        send. May be collective over the world."""
        raise NotImplementedError

    def begin(self, servers: Sequence[Server]) -> None:
        """Before the first bucket."""

    def forget(self) -> None:
        """Before the first bucket: the servers may not be those of the last update any more."""

    def send(self, servers: Sequence[Server], payload: Any) -> None:
        raise NotImplementedError

    def end(self, servers: Sequence[Server], version: int) -> None:
        """After the last bucket."""

    def tidy(self, servers: Sequence[Server]) -> None:
        """After an update, once the servers use it."""

    def release(self) -> None:
        """Let go of the last bucket, which the servers have read, or will not."""

    def close(self, servers: Sequence[Server]) -> None:
        """Let go of everything. The servers may be gone."""


def on_all(servers: Sequence[AnyServer], call: Callable[[AnyServer], Result]) -> list[Result]:
    """call(server) for all of them at the same time; the first failure is raised after all have ended."""
    with ThreadPoolExecutor(max_workers=max(1, len(servers))) as threads:
        return [future.result() for future in [threads.submit(call, server) for server in servers]]
