"""Run the application under uvicorn, with deadlines for requests and limits on connections. Needs the extra `serve`.

uvicorn has no timeout for headers or bodies, and its limit on connections refuses new clients while slow ones stay.
"""

import asyncio
import contextlib
import ipaddress
import json
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nearfar.serve.app import Limits

GRACE = 10  # seconds that requests in progress have left when the server stops
BACKLOG = 512  # connections that the system queues until the server accepts them
LINGER = 5.0  # seconds from the deadline of a body, when the application answers 408, to the end of the connection
FULL = json.dumps({"error": "too many connections are in use; ask again in a moment."}).encode()
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    b"Retry-After: 1\r\nConnection: close\r\n\r\n%s" % (len(FULL), FULL)
)


class Connection(H11Protocol):
    """uvicorn's connection, with deadlines and limits.

    The headers of a request must be complete after `limits.headers` seconds and its body after `limits.seconds` plus
    `LINGER`, however many bytes arrive in between; otherwise the connection is closed. When there are
    `limits.per_client` connections from one address, or `limits.connections` in all, a new one replaces the one that
    has waited for its client the longest, which is answered with 503. If none waits, the new one is refused with 503.
    """

    limits = Limits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._state: tuple[Any, Any] = None, None
        self._since = 0.0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline for headers, and replace another connection if there are too many."""
        super().connection_made(transport)
        self._watch()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        """Parse the data, and update the deadline."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        self._cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Restart the deadline if the state of the request (headers, body, complete) has changed."""
        state = self.cycle, self.conn.their_state
        if state == self._state:
            return
        self._state, self._since = state, self.loop.time()
        self._cancel()
        seconds = {h11.IDLE: self.limits.headers, h11.SEND_BODY: self.limits.seconds + LINGER}.get(state[1])
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self._drop)

    def _make_room(self) -> None:
        """Close the connection that has waited the longest if this client, or all clients, have too many."""
        others = [each for each in self.connections if isinstance(each, Connection) and each is not self]
        own = [each for each in others if each.client and self.client and each.client[0] == self.client[0]]
        for group, most in ((own, self.limits.per_client), (others, self.limits.connections)):
            if most and len(group) >= most:
                waiting = (each for each in group if each._waits())
                min(waiting, key=lambda each: each._since, default=self)._drop(REFUSAL)
                return

    def _waits(self) -> bool:
        """Whether the server waits for the client: to send (the rest of) a request, or to read an answer."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered or self.conn.their_state in (h11.IDLE, h11.SEND_BODY) or self.flow.write_paused

    def _drop(self, words: bytes = b"") -> None:
        """Close at once, after sending `words` unless an answer has been sent in part."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(words)
        self.connections.discard(self)
        self.transport.abort()

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Countdown:
    """Count answered searches, and call `stop` after the last of `requests` (None: no limit).

    >>> ended = []
    >>> countdown = Countdown(2)
    >>> countdown.stop = lambda: ended.append(True)
    >>> for _ in range(2): countdown()
    >>> ended
    [True]
    """

    def __init__(self, requests: int | None) -> None:
        self.left = requests
        self.stop: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        """Count one search."""
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                self.stop()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """Listen on an address; port 0 takes a free one. Clients that connect before the server runs wait for it."""
    found = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        if found is not None:
            found.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"cannot listen on {host}:{port} ({reason}); choose another --host or --port.") from None
    return found


def run(app: Any, listening: socket.socket, countdown: Countdown, limits: Limits, seconds: float | None = None) -> None:
    """Serve until a signal, the end of the countdown, or for the given seconds."""
    config = uvicorn.Config(
        app,
        http=type("Limited", (Connection,), {"limits": limits}),
        ws="none",  # a WebSocket connection would escape the limits
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE,
        lifespan="off",
    )
    server = uvicorn.Server(config)

    def stop() -> None:
        server.should_exit = True

    async def serve() -> None:
        countdown.stop = stop
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, stop)
        await server.serve(sockets=[listening])

    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it has ended
        asyncio.run(serve())
