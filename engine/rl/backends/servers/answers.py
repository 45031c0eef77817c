"""HTTP answers that come to an end: a limit for the whole of an answer, in time and in size.

The limits of the HTTP library hold for one read. A server, or a proxy in front of it, that sends a byte now and then
would hold its caller for ever.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpcore2
import httpx2

MAX_BYTES = 256 << 20  # the longest answer, log-probabilities of a million tokens, has a third of it
PIECE = 1 << 20  # of a request, for which no time limit would hold while it is sent


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class TooLarge(Exception):
    """An answer of more than MAX_BYTES."""


class Client:
    """Calls to `url`, from any thread. headers: of every request."""

    def __init__(self, url: str, headers: dict[str, str]):
        self._limit = _Limit()
        # Proxies of the environment are for the internet.
        self._http = httpx2.Client(base_url=url, headers=headers, trust_env=False, transport=_Transport(self._limit))

    def call(self, method: str, path: str, body: Any, timeout: float, connect: float) -> Answer:
        """timeout: seconds for the request to be sent, and again for the whole answer to arrive. connect: to connect.

        Redirects are not followed. Raises httpx2.RequestError, or TooLarge.
        """
        limits = httpx2.Timeout(timeout, connect=min(timeout, connect), pool=None)
        with self._limit.of(timeout), self._http.stream(method, path, json=body, timeout=limits) as reply:
            data = bytearray()
            for chunk in reply.iter_bytes():
                data += chunk
                if len(data) > MAX_BYTES:
                    raise TooLarge(f"an answer of more than {MAX_BYTES:,} bytes")
            return Answer(reply.status_code, bytes(data))

    def close(self) -> None:
        self._http.close()


class _Limit(threading.local):
    """The time limit of the call that a thread makes."""

    seconds = 0.0
    deadline: float | None = None
    receiving = False

    @contextlib.contextmanager
    def of(self, seconds: float) -> Iterator[None]:
        self.seconds, self.deadline, self.receiving = seconds, time.monotonic() + seconds, False
        try:
            yield
        finally:
            self.deadline = None

    def left(self, timeout: float | None, receiving: bool) -> float | None:
        """Seconds for the next operation of a connection, at most `timeout`; None: no limit."""
        if self.deadline is None:
            return timeout
        if receiving and not self.receiving:
            self.receiving, self.deadline = True, time.monotonic() + self.seconds
        left = self.deadline - time.monotonic()
        return left if timeout is None else min(left, timeout)


class _Transport(httpx2.HTTPTransport):
    """The library's own, over connections that know the limit of a call."""

    def __init__(self, limit: _Limit):
        super().__init__(trust_env=False)
        self._pool = httpcore2.ConnectionPool(
            ssl_context=httpx2.create_ssl_context(trust_env=False),
            max_connections=None,  # the caller has a limit of its own
            max_keepalive_connections=64,
            keepalive_expiry=5.0,
            network_backend=_Backend(httpcore2.SyncBackend(), limit),
        )


class _Stream(httpcore2.NetworkStream):
    def __init__(self, stream: httpcore2.NetworkStream, limit: _Limit):
        self._stream, self._limit = stream, limit

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        left = self._limit.left(timeout, receiving=True)
        if left is not None and left <= 0:
            raise httpcore2.ReadTimeout("the whole answer took too long")
        return self._stream.read(max_bytes, left)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), PIECE):
            left = self._limit.left(timeout, receiving=False)
            if left is not None and left <= 0:
                raise httpcore2.WriteTimeout("the whole request took too long")
            self._stream.write(buffer[start : start + PIECE], left)

    def close(self) -> None:
        self._stream.close()

    def start_tls(self, *given: Any, **options: Any) -> httpcore2.NetworkStream:
        return _Stream(self._stream.start_tls(*given, **options), self._limit)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _Backend(httpcore2.NetworkBackend):
    def __init__(self, backend: httpcore2.NetworkBackend, limit: _Limit):
        self._backend, self._limit = backend, limit

    def connect_tcp(self, *given: Any, **options: Any) -> httpcore2.NetworkStream:
        return _Stream(self._backend.connect_tcp(*given, **options), self._limit)

    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)
