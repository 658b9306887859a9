"""A layer around the application: which hosts may call, headers of every answer, a count, no traceback outside."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from nearfar.serve.metrics import Metrics

__all__ = ["LOOPBACK", "Guard"]

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Names of the machine for itself."""
HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"), (b"x-frame-options", b"DENY"))

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class Guard:
    """ASGI middleware.

    Args:
        app: what it surrounds.
        metrics: where requests are counted.
        hosts: names that the header Host may bear; None for any.
    """

    def __init__(self, app: Application, metrics: Metrics, hosts: frozenset[str] | None) -> None:
        self.app, self.metrics, self.hosts = app, metrics, hosts

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *HEADERS]
                self.metrics.request(scope["path"], status)
            await send(message)

        if not self._may_call(scope):
            await _answer(counted, 421, "this server is not called so; use the address that it printed.")
            return
        try:
            await self.app(scope, receive, counted)
        except Exception:
            logging.getLogger("uvicorn.error").exception("nearfar serve: a request failed")
            if not status:
                await _answer(counted, 500, "the search failed; the server's log says why.")

    def _may_call(self, scope: Message) -> bool:
        host = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        return self.hosts is None or name.lower() in self.hosts


async def _answer(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"error": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
