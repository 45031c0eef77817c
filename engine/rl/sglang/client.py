"""One SGLang server over HTTP: what we ask, what it answers, and the two ways in which that fails.

The endpoints and fields are those of SGLang 0.5.23 (docs/rollout.md tells which, and what older servers lack).
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2

from isoloss.engine.rl.trajectory import Finish

CONNECT_SECONDS = 10.0
PROBE_SECONDS = 10.0  # for a question that any living server answers at once

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
class Piece:
    """What one call of /generate gave: tokens [T], their logprobs [T] and weight versions [T], why it ended."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish


@dataclass(frozen=True)
class ServerInfo:
    """tp_size: processes that hold a share of the weights. device: "cuda", "cpu" ... gives_memory_back: started with
    --enable-memory-saver. keeps_weights: with --enable-weights-cpu-backup, so that they survive giving back theirs."""

    tp_size: int
    device: str
    gives_memory_back: bool
    keeps_weights: bool


class SGLangServer:
    """Calls to one server; from any thread. Each raises ServerLost or Refused.

    timeout: seconds that an answer may take, in all calls that do not say otherwise.
    """

    def __init__(self, url: str, timeout: float):
        self.url = url.rstrip("/")
        self._timeout = timeout
        self.asleep: set[str] = set()  # what memory it has given back, by SGLang's tags
        self._paused = False
        self._has_sessions = True  # of weight updates; older servers have none, which the first call shows
        # Proxies of the environment are for the internet. No limit on connections: the caller has its own.
        self._http = httpx2.Client(
            base_url=self.url, trust_env=False, limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        )

    def __repr__(self) -> str:
        return self.url

    def close(self) -> None:
        self._http.close()

    # ---- generation -------------------------------------------------------------------------------------------------

    def generate(self, tokens: Sequence[int], params: Mapping[str, Any]) -> Piece:
        """Continue `tokens`, under SGLang's sampling parameters."""
        body = {"input_ids": list(tokens), "sampling_params": dict(params), "return_logprob": True}
        reply = self.post("/generate", body)
        try:
            return read_piece(reply)
        except (KeyError, TypeError, IndexError) as error:
            raise ServerLost(f"{self.url}/generate answered without {error}") from None

    def pause(self) -> None:
        """Stop producing tokens. Requests under way go back to the queue, so that no cache of theirs is in use."""
        self._paused = True
        self.post("/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        self.post("/continue_generation", {})
        self._paused = False

    def abort(self) -> None:
        """End every request that has reached the scheduler; those that wait for `resume` have not."""
        self.post("/abort_request", {"abort_all": True}, answer=False)

    # ---- state ------------------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """That it answers at all, which takes no time."""
        self.get("/model_info")

    def check_health(self) -> None:
        """That it can make a token, which takes a second; while it is paused or asleep, that it answers at all."""
        if self._paused or self.asleep:
            self.check_alive()
        else:
            self.get("/health", answer=False)

    def weight_version(self) -> int | None:
        """The version that the server says it serves, None if it is not one of ours: those are numbers."""
        version = str(self.get("/model_info").get("weight_version"))
        return int(version) if version.isdecimal() else None

    def info(self) -> ServerInfo:
        said = self.get("/server_info")
        return ServerInfo(
            tp_size=int(said.get("tp_size", 1)),
            device=str(said.get("device", "cuda")),
            gives_memory_back=bool(said.get("enable_memory_saver")),
            keeps_weights=bool(said.get("enable_weights_cpu_backup")),
        )

    def checksums(self) -> list[dict[str, str]]:
        """Of each rank of the server, the checksum of each of its weights, by SGLang's names."""
        ranks = self.post("/weights_checker", {"action": "checksum"})["ranks"]
        return [rank["checksums"] for rank in ranks]

    def release_memory(self, tags: Sequence[str]) -> None:
        self.post("/release_memory_occupation", {"tags": list(tags)}, answer=False)
        self.asleep |= set(tags)

    def resume_memory(self, tags: Sequence[str]) -> None:
        self.post("/resume_memory_occupation", {"tags": list(tags)}, answer=False)
        self.asleep -= set(tags)

    # ---- weights ----------------------------------------------------------------------------------------------------

    def flush_cache(self) -> None:
        """Forget keys and values that the present weights made. Refused while requests run; those of a `pause` do not,
        but only without the endpoint's `timeout`, which waits for an empty queue."""
        self.post("/flush_cache", {}, answer=False)

    def begin_update(self) -> None:
        """Open a session of weight updates, closing one that a failed update left open."""
        if not self._has_sessions:
            return
        try:
            self.post("/begin_weight_update", {})
        except Refused as refused:
            if refused.status == 404:
                self._has_sessions = False
            elif "already open" in str(refused):
                self.end_update()
                self.post("/begin_weight_update", {})
            else:
                raise

    def end_update(self) -> None:
        if self._has_sessions:
            self.post("/end_weight_update", {})

    def set_weight_version(self, version: int) -> None:
        """Call the weights that are there `version`; requests under way keep the versions of their tokens so far."""
        self.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    # ---- how --------------------------------------------------------------------------------------------------------

    def get(self, path: str, answer: bool = True) -> Any:
        """The parsed reply to a question that takes a living server no time."""
        return self._call("GET", path, None, PROBE_SECONDS, answer)

    def post(self, path: str, body: Mapping[str, Any], answer: bool = True) -> Any:
        """The parsed reply; with answer=False, whatever it is does not matter."""
        return self._call("POST", path, body, self._timeout, answer)

    def _call(self, method: str, path: str, body: Any, timeout: float, answer: bool = True) -> Any:
        limits = httpx2.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS), pool=None)
        try:
            reply = self._http.request(method, path, json=body, timeout=limits)
        except httpx2.TransportError as error:
            timed_out = isinstance(error, httpx2.ReadTimeout)
            what = f"no answer in {timeout:g} seconds" if timed_out else str(error) or type(error).__name__
            raise ServerLost(f"{self.url}{path}: {what}", timed_out) from None
        if reply.status_code >= 500:
            raise ServerLost(f"{self.url}{path}: status {reply.status_code}: {_message(reply)}")
        if reply.status_code >= 400:
            raise Refused(f"{self.url}{path}: {_message(reply)}", reply.status_code)
        if not answer:
            return None
        try:
            return reply.json()
        except ValueError:
            raise ServerLost(f"{self.url}{path}: an answer that is not JSON: {reply.text[:80]!r}") from None


def read_piece(reply: Mapping[str, Any]) -> Piece:
    """The tokens of a reply of /generate. ServerLost where weights that are not ours produced some of them."""
    tokens = tuple(int(token) for token in reply["output_ids"])
    meta = reply["meta_info"]
    logprobs = tuple(float(entry[0]) for entry in meta["output_token_logprobs"][: len(tokens)])
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
    versions = [str(span["version"]) for span in spans for _ in range(span["start"], span["end"])][: len(tokens)]
    # A request that was aborted in the queue returns fewer tokens than it had made, or spans that end before them.
    versions += [str(meta["weight_version"])] * (len(tokens) - len(versions))
    strange = [version for version in versions if not version.isdecimal()]
    if strange:
        raise ServerLost(f"the server was restarted: its weights are {strange[0]!r}")
    return Piece(tokens, logprobs, tuple(map(int, versions)), meta["finish_reason"]["type"])


def on_all(servers: Sequence[SGLangServer], call: Callable[[SGLangServer], Result]) -> list[Result]:
    """call(server) for all of them at the same time; the first failure is raised after all have ended."""
    with ThreadPoolExecutor(max_workers=max(1, len(servers))) as threads:
        return [future.result() for future in [threads.submit(call, server) for server in servers]]


def _message(reply: httpx2.Response) -> str:
    """What the server says went wrong, on one line: its JSON holds that in one of several places."""
    try:
        said = reply.json()
    except ValueError:
        said = reply.text
    if isinstance(said, dict):
        said = said.get("error") or said
        said = said.get("message") or said.get("detail") or said if isinstance(said, dict) else said
    return " ".join(str(said).split())[:500]
