"""Connections of `nearfar serve`: how long a client may take to send a request, and which one makes room for another.

uvicorn alone waits for ever for the end of a request, and counts connections that have sent nothing against its limit.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from nearfar.serve.app import Limits

__all__ = ["LINGER", "Connection"]

LINGER = 5.0
"""Seconds that a connection outlives the time of a body, so that a slow sender reads the refusal."""
FULL = json.dumps({"error": "too many connections are in use; ask again in a moment."}).encode()
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    b"Retry-After: 1\r\nConnection: close\r\n\r\n%s" % (len(FULL), FULL)
)


class Connection(H11Protocol):
    """A connection of uvicorn that is closed when its request is late or when its place is needed.

    A client has `limits.headers` seconds for the headers of a request and `limits.seconds` (and `LINGER`) for its body,
    however many bytes arrive in between. Beyond `limits.per_client` connections from one address, or
    `limits.connections` in all, the one that has waited for its client the longest is answered with 503 and closed; if
    all are at work, the new one is.
    """

    limits = Limits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._state: tuple[Any, Any] = None, None
        self._since = 0.0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, and start to wait for the headers."""
        super().connection_made(transport)
        self._watch()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        """Read what came, and wait for what is missing."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place free."""
        self._cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Set the deadline anew where the request came further: from nothing to headers to a body to its end."""
        state = self.cycle, self.conn.their_state
        if state == self._state:
            return
        self._state, self._since = state, self.loop.time()
        self._cancel()
        seconds = {h11.IDLE: self.limits.headers, h11.SEND_BODY: self.limits.seconds + LINGER}.get(state[1])
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self._drop)

    def _make_room(self) -> None:
        """Close the longest waiting connection of this client, or of all, if there are too many; or else this one."""
        others = [each for each in self.connections if isinstance(each, Connection) and each is not self]
        own = [each for each in others if each.client and self.client and each.client[0] == self.client[0]]
        for group, most in ((own, self.limits.per_client), (others, self.limits.connections)):
            if most and len(group) >= most:
                waiting = (each for each in group if each._waits())
                min(waiting, key=lambda each: each._since, default=self)._drop(REFUSAL)
                return

    def _waits(self) -> bool:
        """Whether the client has to act next: send the rest of a request or a new one, or read an answer."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered or self.conn.their_state in (h11.IDLE, h11.SEND_BODY) or self.flow.write_paused

    def _drop(self, words: bytes = b"") -> None:
        """Close without waiting for the client to read; first say why, if no answer is on its way."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(words)
        self.connections.discard(self)
        self.transport.abort()

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
