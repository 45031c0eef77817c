"""An SGLang server: its endpoints.

They are those of SGLang 0.5.23 (docs/rollout.md lists them, and what older servers lack).
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from isoloss.engine.rl.backends.servers.api_key import ApiKey
from isoloss.engine.rl.backends.servers.server import Refused, Server, ServerInfo, ServerLost
from isoloss.engine.rl.backends.sglang.routes import routes_request, with_routes
from isoloss.engine.rl.trajectory import Completion, Request, Sampling


class SGLangServer(Server):
    memory_options = "--enable-memory-saver (and --enable-weights-cpu-backup, to give back that of its weights too)"

    def __init__(self, url: str, timeout: float, key: ApiKey | None = None):
        super().__init__(url, timeout, key)
        self._paused = False
        self._has_sessions = True  # of weight updates; older servers have none, which the first call shows

    # ---- generation -------------------------------------------------------------------------------------------------

    def generate(self, request: Request, tokens: Sequence[int], sampling: Sampling, budget: int) -> Completion:
        reply = self.post("/generate", request_body(request, tokens, sampling, budget))
        try:
            return with_routes(read_reply(request.id, reply), reply, request, len(tokens), sampling)
        except ServerLost as lost:
            raise ServerLost(f"{self.url}/generate: {lost}") from None

    def pause(self) -> None:
        """See `Server`: requests under way go back to the queue."""
        self._paused = True
        self.post("/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        self.post("/continue_generation", {})
        self._paused = False

    def abort(self) -> None:
        """See `Server`: requests that wait for `resume` have not reached the scheduler."""
        self.post("/abort_request", {"abort_all": True}, answer=False)

    # ---- state ------------------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        self.get("/model_info")

    def check_health(self) -> None:
        """See `Server`. Making a token takes a second."""
        if self._paused or self.asleep:
            self.check_alive()
        else:
            self.get("/health", answer=False)

    def weight_version(self) -> int | None:
        """See `Server`: our versions are numbers."""
        return version_of(self.get("/model_info").get("weight_version"))

    def info(self) -> ServerInfo:
        info = self.get("/server_info")
        return ServerInfo(
            tp_size=int(info.get("tp_size", 1)),
            device=str(info.get("device", "cuda")),
            gives_memory_back=bool(info.get("enable_memory_saver")),
            keeps_weights=bool(info.get("enable_weights_cpu_backup")),
            release=info.get("version"),
        )

    def checksums(self) -> list[dict[str, str]]:
        """See `Server`. The names are SGLang's."""
        ranks = self.post("/weights_checker", {"action": "checksum"})["ranks"]
        return [rank["checksums"] for rank in ranks]

    def release_memory(self, tags: Sequence[str]) -> None:
        self.post("/release_memory_occupation", {"tags": list(tags)}, answer=False)

    def resume_memory(self, tags: Sequence[str]) -> None:
        self.post("/resume_memory_occupation", {"tags": list(tags)}, answer=False)

    # ---- weights ----------------------------------------------------------------------------------------------------

    def flush_cache(self) -> None:
        """See `Server`. Refused while requests run; those of a `pause` do not, but only without the endpoint's
        `timeout`, which waits for an empty queue."""
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
        self.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})


def request_body(request: Request, tokens: Sequence[int], sampling: Sampling, budget: int) -> dict[str, Any]:
    """Return the body of /generate."""
    params = sampling_params(request, sampling, budget)
    routes = routes_request(request, sampling, len(tokens))
    return {"input_ids": list(tokens), "sampling_params": params, "return_logprob": True, **routes}


def read_reply(request_id: str, reply: Mapping[str, Any], adapter: int | None = None) -> Completion:
    """The tokens of a reply of /generate. ServerLost where it is not of the form that it should have, or weights that
    are not ours produced some of its tokens.

    adapter: version of the adapter that the request named, on weights that are the server's own.
    """
    try:
        return _completion(request_id, reply, adapter)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ServerLost(f"a reply that cannot be read: {type(error).__name__}: {error}") from None


def _completion(request_id: str, reply: Mapping[str, Any], adapter: int | None) -> Completion:
    tokens, meta = reply["output_ids"], reply["meta_info"]
    finish, entries = meta["finish_reason"]["type"], meta["output_token_logprobs"]
    if any(type(token) is not int for token in tokens):  # True is one, too
        raise ValueError("a token id is no integer")
    # A request that was aborted in the queue returns fewer tokens than it had made, or spans that end before them.
    if len(entries) != len(tokens) and not (finish == "abort" and len(entries) > len(tokens)):
        raise ValueError(f"{len(entries)} log-probabilities of {len(tokens)} tokens")
    entries = entries[: len(tokens)]
    if [entry[1] for entry in entries] != tokens:
        raise ValueError("log-probabilities of other tokens")
    if any(not isinstance(entry[0], float | int) for entry in entries):
        raise ValueError("a log-probability is no number")
    told: list[object] = []
    for span in meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]:
        if len(told) == len(tokens):
            break
        if span["start"] != len(told):
            raise ValueError("spans of weight versions with gaps")
        told += [span["version"]] * (min(span["end"], len(tokens)) - span["start"])
    told += [meta["weight_version"]] * (len(tokens) - len(told))
    if adapter is not None:
        sent = [version for version in told if version_of(version) is not None]
        if sent:
            raise ServerLost(f"another run has sent weights to the server: its version is {sent[0]!r}")
        versions = [adapter] * len(tokens)
    else:
        strange = [version for version in told if version_of(version) is None]
        if strange:
            raise ServerLost(f"the server was restarted: its weights are {strange[0]!r}")
        versions = [int(str(version)) for version in told]
    return Completion(request_id, tokens, [entry[0] for entry in entries], versions, finish)


def version_of(told: object) -> int | None:
    """Return the number of a version of the trainer, None for another: the trainer counts, in few digits."""
    text = str(told)
    return int(text) if text.isdecimal() and len(text) < 10 else None


def sampling_params(request: Request, sampling: Sampling, budget: int) -> dict[str, Any]:
    """SGLang's words for `sampling`;

    budget: tokens still to make.

    The seed counts where the server runs with --enable-deterministic-inference, which also makes it use the position
    of a token: a completion that goes on after an abort then gets the tokens it would have had.
    """
    return {
        "max_new_tokens": budget,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "sampling_seed": zlib.crc32(f"{sampling.seed} {request.id}".encode()) & 0x7FFFFFFF,
    }
