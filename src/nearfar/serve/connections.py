"""Connections of `nearfar serve`: deadlines for requests, and limits on their number.

uvicorn has no timeout for headers or bodies; its limit on connections refuses new clients while slow ones stay.
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
"""Seconds between the end of the time for a body, when the application answers 408, and the end of the connection."""
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
    has waited for its client the longest, which is answered with 503. If none waits, the new one is.
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
        """Restart the deadline if the request is in another state than before: headers, body, complete."""
        state = self.cycle, self.conn.their_state
        if state == self._state:
            return
        self._state, self._since = state, self.loop.time()
        self._cancel()
        seconds = {h11.IDLE: self.limits.headers, h11.SEND_BODY: self.limits.seconds + LINGER}.get(state[1])
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self._drop)

    def _make_room(self) -> None:
        """If there are too many connections, of this client or of all, close the one that has waited the longest."""
        others = [each for each in self.connections if isinstance(each, Connection) and each is not self]
        own = [each for each in others if each.client and self.client and each.client[0] == self.client[0]]
        for group, most in ((own, self.limits.per_client), (others, self.limits.connections)):
            if most and len(group) >= most:
                waiting = (each for each in group if each._waits())
                min(waiting, key=lambda each: each._since, default=self)._drop(REFUSAL)
                return

    def _waits(self) -> bool:
        """Whether the client is to act next: to send a request or the rest of one, or to read an answer."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered or self.conn.their_state in (h11.IDLE, h11.SEND_BODY) or self.flow.write_paused

    def _drop(self, words: bytes = b"") -> None:
        """Close at once; send `words` before, unless an answer has been sent in part."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(words)
        self.connections.discard(self)
        self.transport.abort()

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
