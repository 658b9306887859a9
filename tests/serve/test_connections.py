"""Connections of `nearfar serve` on loopback: slow clients are closed, and none blocks others."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from needs import need
from shop import Server

from nearfar.evaluation import Index
from nearfar.serve import Searcher

need("fastapi", "prometheus_client", "uvicorn")
from nearfar.serve._server import Countdown, bind, run  # noqa: E402
from nearfar.serve.app import Limits, create_app  # noqa: E402

HEADERS = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
SEARCH = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
LATE = 30
"""Seconds after which a test gives up."""


@contextlib.contextmanager
def serving(searcher: Searcher | None = None, **limits: float) -> Iterator[Server]:
    """A server in a thread, which ends with the block, and after two minutes in any case."""
    given, countdown = Limits(**limits), Countdown(None)
    app = create_app(searcher or Searcher(Index(torch.eye(3))), limits=given)
    listening = bind("127.0.0.1", 0)
    thread = threading.Thread(target=run, args=(app, listening, countdown, given, 120))
    thread.start()
    server = Server(None, listening.getsockname()[1])
    try:
        assert server.ask("GET", "/health")[0] == 200
        yield server
    finally:
        countdown.stop()
        thread.join(LATE)
        assert not thread.is_alive()


@contextlib.contextmanager
def lines(server: Server, number: int, words: bytes) -> Iterator[list[socket.socket]]:
    """Connections that have sent some words."""
    with contextlib.ExitStack() as stack:
        address = "127.0.0.1", server.port
        found = [stack.enter_context(socket.create_connection(address, timeout=LATE)) for _ in range(number)]
        for line in found:
            line.sendall(words)
        yield found


def answer(line: socket.socket) -> int:
    """The status of the next answer, which is read to its end."""
    found = http.client.HTTPResponse(line)
    found.begin()
    found.read()
    return found.status


def rest(line: socket.socket) -> bytes:
    """What the server sends until it closes; a timeout is an error."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := line.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def trickle(line: socket.socket) -> None:
    """A byte now and then, until the server closes."""
    end = time.monotonic() + LATE
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while time.monotonic() < end:
            line.sendall(b"a")
            time.sleep(0.02)
    assert time.monotonic() < end


@pytest.mark.parametrize(
    "words", [b"", HEADERS + b"X: ", SEARCH % (b"image/jpeg", 40)], ids=["nothing", "headers", "a body"]
)
def test_slow_clients_keep_no_places(words):
    """Many more than there are places; those that waited longest make room, and honest requests are answered."""
    with serving(connections=8) as server, lines(server, 30, words) as slow:
        for _ in range(3):
            assert server.ask("GET", "/health")[0] == 200
        assert all(rest(line).startswith(b"HTTP/1.1 503 ") for line in slow[:22])
        slow[-1].setblocking(False)
        with pytest.raises(BlockingIOError):  # a place that nobody needed is kept
            slow[-1].recv(1)


def test_headers_that_never_end_are_given_up():
    with serving(headers=1) as server, contextlib.ExitStack() as stack:
        silent, begun, slow, again = (
            stack.enter_context(lines(server, 1, words))[0]
            for words in (b"", HEADERS, HEADERS + b"X: ", HEADERS + b"\r\n")
        )
        assert answer(again) == 200
        again.sendall(b"GET")  # the second request of a connection
        for line in (slow, again):
            trickle(line)
        assert [rest(silent), rest(begun)] == [b"", b""]


def test_slow_bodies_are_given_up(monkeypatch):
    with serving(seconds=0.2) as server:
        with lines(server, 1, SEARCH % (b"image/jpeg", 40) + b"a") as (line,):
            assert answer(line) == 408
        monkeypatch.setattr("nearfar.serve._server.LINGER", 0.1)
        with lines(server, 1, SEARCH % (b"text/html", 9999)) as (line,):  # refused before its body has come
            assert answer(line) == 415
            trickle(line)


def test_idle_connections_are_given_up():
    with serving(headers=1) as server, lines(server, 1, HEADERS + b"\r\n") as (line,):
        with lines(server, 1, SEARCH % (b"text/html", 40)) as (refused,):
            assert answer(refused) == 415
            refused.sendall(bytes(40))
            assert rest(refused) == b""
        assert rest(line).startswith(b"HTTP/1.1 200 OK")  # and then the end, after 5 seconds


def test_a_connection_may_ask_for_longer_than_its_headers_may_take():
    with serving(headers=1) as server, lines(server, 1, b"") as (line,):
        for _ in range(15):
            line.sendall(HEADERS + b"\r\n")
            assert answer(line) == 200
            time.sleep(0.1)


def test_answers_that_are_not_read_keep_no_places():
    """Requests are sent until the system takes no more, and not an answer is read."""
    many = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1_000_000
    with serving(connections=2) as server, lines(server, 2, b"") as slow:
        for line in slow:
            line.settimeout(0.5)
            with pytest.raises(TimeoutError):
                line.sendall(many)
        end = time.monotonic() + LATE
        while server.ask("GET", "/health")[0] != 200:  # 503 while the server still answers both
            assert time.monotonic() < end
            time.sleep(0.1)


@pytest.mark.parametrize("limit", ["per_client", "connections"])
def test_connections_at_work_are_kept(limit):
    """Where all are being answered, the next one hears so, and is taken once there is a place."""
    free, begun = threading.Event(), threading.Semaphore(0)
    searcher = Searcher(Index(torch.eye(3)))
    honest = searcher.index.search

    def held(x, k):
        begun.release()
        free.wait(LATE)
        return honest(x, k)

    searcher.index.search = held
    body = b'{"vector": [1.0, 0.0, 0.0]}'
    words = SEARCH % (b"application/json", len(body)) + body
    with serving(searcher, **{limit: 2}) as server, lines(server, 2, words) as busy:
        assert begun.acquire(timeout=LATE)
        assert begun.acquire(timeout=LATE)
        with lines(server, 1, b"") as (line,):
            head, _, said = rest(line).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert said == b'{"error": "too many connections are in use; ask again in a moment."}'
        free.set()
        for line in busy:
            assert answer(line) == 200
        assert server.ask("GET", "/health")[0] == 200


def test_a_limit_is_of_one_address():
    """Three connections of 127.0.0.1 share two places; 127.0.0.2 has its own."""
    with serving(per_client=2) as server, lines(server, 3, HEADERS) as slow:
        assert rest(slow[0]).startswith(b"HTTP/1.1 503 ")
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", server.port), LATE, ("127.0.0.2", 0)) as other:
                other.sendall(HEADERS + b"\r\n")
                assert answer(other) == 200
        for line in slow[1:]:
            line.sendall(b"\r\n")
            assert answer(line) == 200
