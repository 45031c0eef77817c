"""Speak HTTP to a server as a client that does not give up, through a network with faults."""

import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

PATIENCE = 300.0  # seconds without an answer after which a server counts as dead
PAUSE = 0.2
THREADS = 8


class SessionError(Exception):
    """A session that ended with a refused request or a dead server; one line."""


@dataclass(frozen=True)
class Disturbance:
    """The faults that requests meet on their way.

    lost: share of requests whose answer is lost after the work, so that they are sent again.
    doubled: share of requests that arrive twice at the same time.
    shuffled: whether requests that wait arrive in an order of chance; else those of a call in parts as the SDK sends
        them, the first one last.
    chunk: datums of a part of a call.
    """

    lost: float = 0.0
    doubled: float = 0.0
    shuffled: bool = False
    chunk: int = 1024


UNDISTURBED = Disturbance()


class Connection:
    """The connection of one training client. Requests in JSON are dictionaries, others bytes, compressed with zstd.

    key: API key. check: called while no server answers; raises SessionError where none will. heard: called for
    every answer.
    """

    def __init__(
        self,
        url: str,
        key: str,
        disturbance: Disturbance = UNDISTURBED,
        *,
        seed: int = 0,
        check: Callable[[], None] = lambda: None,
        heard: Callable[[], None] = lambda: None,
    ):
        self._url, self._key, self.disturbance = url, key, disturbance
        self._check, self._heard = check, heard
        self._random, self._drawing = random.Random(seed), threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS)

    def close(self) -> None:
        self._threads.shutdown()

    def post(self, path: str, body: Mapping[str, Any] | bytes, **headers: str) -> dict[str, Any]:
        """Send a request, as often as the disturbance wants it, and return its last answer."""
        with self._drawing:
            lost, doubled = (
                self._random.random() < share for share in (self.disturbance.lost, self.disturbance.doubled)
            )
        if doubled:
            answers = self._twice(lambda: self._send(path, body, headers))
        else:
            answers = [self._send(path, body, headers)[1] for _ in range(2 if lost else 1)]
        if any(answer != answers[0] for answer in answers):
            raise SessionError(
                f"{path}: a request that was sent twice got two answers, {answers[0]!r} and {answers[1]!r}"
            )
        return json.loads(answers[-1])

    def post_all(self, calls: Sequence[Sequence[tuple[str, Mapping[str, Any] | bytes]]]) -> list[list[str]]:
        """Send the parts of calls, and return the ids of their futures."""
        if self.disturbance.shuffled:
            places = [(k, part) for k, parts in enumerate(calls) for part in range(len(parts))]
            self._random.shuffle(places)
            sent = self._threads.map(lambda place: self.post(*calls[place[0]][place[1]]), places)
            ids = dict(zip(places, (answer["request_id"] for answer in sent), strict=True))
            return [[ids[k, part] for part in range(len(parts))] for k, parts in enumerate(calls)]
        futures = []
        for first, *others in calls:
            behind = [answer["request_id"] for answer in self._threads.map(lambda part: self.post(*part), others)]
            futures.append([self.post(*first)["request_id"], *behind])
        return futures

    def result(self, request_id: str) -> bytes:
        """Wait for the result of a request. Raises SessionError where it failed."""
        while True:
            status, answer = self._send("retrieve_future", {"request_id": request_id}, {})
            if status == 408:
                continue
            if answer.startswith(b"{") and "error" in (failed := json.loads(answer)):
                raise SessionError(failed["error"])
            return answer

    def _twice(self, send: Callable[[], tuple[int, bytes]]) -> list[bytes]:
        """Send a request twice at the same time. Not on the connection's threads, which may all wait for this."""
        with ThreadPoolExecutor(2) as threads:
            return [future.result()[1] for future in [threads.submit(send) for _ in range(2)]]

    def _send(self, path: str, body: Mapping[str, Any] | bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Send a request until it is answered. Return the status, 200 or 408, and the body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = (
            {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
            if isinstance(body, bytes)
            else {"Content-Type": "application/json"}
        )
        headers = {"X-API-Key": self._key, **kind, **headers}
        began = time.monotonic()
        while True:
            request = urllib.request.Request(f"{self._url}/api/v1/{path}", data, headers)
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    answer = response.read()
                self._heard()
                return 200, answer
            except urllib.error.HTTPError as error:
                status, answer = error.code, error.read()
            except (OSError, http.client.HTTPException) as error:
                status, answer = 503, str(error).encode()
            if status == 408:
                return status, answer
            if status < 500 and status != 429:
                raise SessionError(f"{path}: {status} {answer.decode(errors='replace')}")
            self._check()
            if time.monotonic() - began > PATIENCE:
                raise SessionError(f"{path}: no answer for {PATIENCE:g} s: {answer.decode(errors='replace')}")
            time.sleep(PAUSE)
