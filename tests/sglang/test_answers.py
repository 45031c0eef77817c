"""Answers that do not end, are too long, or come from something in front of the server; and whole ones."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from isoloss.engine.rl.backends.servers import answers, server
from isoloss.engine.rl.backends.servers.server import Refused, ServerLost
from isoloss.engine.rl.backends.sglang.server import SGLangServer

OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s"


@pytest.fixture
def serve() -> Iterator[Callable[..., SGLangServer]]:
    """serve(pieces, seconds=, timeout=): a server that answers every request by these bytes, so many seconds apart."""
    stop, listening = threading.Event(), socket.create_server(("127.0.0.1", 0))

    def begin(pieces: Sequence[bytes], seconds: float = 0.0, timeout: float = 0.5) -> SGLangServer:
        def answer(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                while connection.recv(1 << 16) and not stop.is_set():
                    for piece in pieces:
                        connection.sendall(piece)
                        if stop.wait(seconds):
                            return

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return SGLangServer(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout)

    yield begin
    stop.set()
    listening.close()


def whole(value: object) -> bytes:
    body = json.dumps(value).encode()
    return OK % (len(body), body)


@pytest.mark.parametrize("status", (301, 302, 303, 307, 308, 304, 300))
def test_a_redirect_is_no_answer(status, serve):
    """Whatever calls do not look at the answer: a proxy that redirects is no healthy server, and old keys and values
    would stay."""
    found = serve([b"HTTP/1.1 %d X\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n" % status])
    for call in (found.flush_cache, found.abort, found.check_alive):
        with pytest.raises(ServerLost, match=rf"127.0.0.1:\d+/\w+: status {status}"):
            call()


@pytest.mark.parametrize(
    ("status", "error"), ((200, None), (204, None), (404, Refused), (500, ServerLost), (503, ServerLost))
)
def test_other_statuses(status, error, serve):
    found = serve([b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status])
    with pytest.raises(error) if error else contextlib.nullcontext():
        found.post("/x", {}, answer=False)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n"
DRIPS = {
    "status": [bytes([byte]) for byte in b"HTTP/1.1 200 OK\r\n" * 99],
    "headers": [b"HTTP/1.1 200 OK\r\n", *[b"X-A: b\r\n"] * 999],
    "body": [HEAD, *[b" "] * 999],
    "chunks": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"1\r\n \r\n"] * 999],
}


@pytest.mark.parametrize("pieces", DRIPS.values(), ids=DRIPS)
def test_a_slow_drip_ends_with_the_limit(pieces, serve):
    """Each byte comes in time, and the last one never."""
    found = serve(pieces, seconds=0.02)
    started = time.monotonic()
    with pytest.raises(ServerLost, match=r"no whole answer in 0\.5 seconds") as raised:
        found.post("/generate", {})
    assert raised.value.timed_out and 0.4 < time.monotonic() - started < 5


def test_a_slow_drip_holds_no_probe(serve, monkeypatch):
    monkeypatch.setattr(server, "PROBE_SECONDS", 0.3)
    with pytest.raises(ServerLost, match=r"no whole answer in 0\.3 seconds"):
        serve(DRIPS["body"], seconds=0.02, timeout=60).get("/x")


def test_a_request_that_is_taken_slowly_ends_with_the_limit(monkeypatch):
    """By a server that reads a little now and then."""
    monkeypatch.setattr(answers, "PIECE", 1 << 12)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

        def sip() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                while connection.recv(2048):
                    time.sleep(0.02)

        threading.Thread(target=sip, daemon=True).start()
        found = SGLangServer(f"http://127.0.0.1:{listening.getsockname()[1]}", 0.5)
        started = time.monotonic()
        with pytest.raises(ServerLost):
            found.post("/x", {"weights": "a" * (1 << 25)})
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("head", (b"Content-Length: 100000", b"Transfer-Encoding: chunked"), ids=("length", "chunked"))
def test_an_answer_has_a_largest_size(head, serve, monkeypatch):
    monkeypatch.setattr(answers, "MAX_BYTES", 5000)
    piece = b"3e8\r\n" + b" " * 1000 + b"\r\n" if b"chunked" in head else b" " * 1000
    with pytest.raises(ServerLost, match="an answer of more than 5,000 bytes"):
        serve([b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n", *[piece] * 99]).post("/x", {})


def test_a_whole_answer_is_read_and_its_connection_used_again(serve):
    """In pieces, by several threads, each with a limit of its own; and between calls no limit runs."""
    body = whole({"a": list(range(50))})
    found = serve([body[:10], body[10:60], body[60:]], seconds=0.05)
    for _ in range(2):
        assert found.post("/x", {}) == {"a": list(range(50))}
        time.sleep(0.6)
    results = server.on_all([found] * 4, lambda each: each.get("/x"))
    assert results == [{"a": list(range(50))}] * 4
