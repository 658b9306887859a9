"""The middleware around the application: checks hosts, adds headers, counts answers, and hides tracebacks.

Needs the extra `serve`.
"""

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import prometheus_client as prometheus

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})  # names by which a machine calls itself
HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"), (b"x-frame-options", b"DENY"))

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]
PATHS = ("/search", "/picture", "/health", "/metrics", "/")
"""Paths that are counted by name; others are counted together, so that clients cannot fill the memory with them."""
TIMES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """Requests by path and status, times of searches, and memory of one server, for Prometheus."""

    media_type = prometheus.CONTENT_TYPE_LATEST

    def __init__(self, vectors: int) -> None:
        self._registry = prometheus.CollectorRegistry()
        all_in: Any = {"registry": self._registry}
        prometheus.ProcessCollector(**all_in)
        self._requests = prometheus.Counter("nearfar_requests", "Requests answered.", ("path", "status"), **all_in)
        what = "Seconds from a whole body to its answer."
        self._seconds = prometheus.Histogram("nearfar_search_seconds", what, buckets=TIMES, **all_in)
        prometheus.Gauge("nearfar_index_vectors", "Vectors in the index.", **all_in).set(vectors)

    def count_request(self, path: str, status: int) -> None:
        first = "/" + path.lstrip("/").partition("/")[0]
        self._requests.labels(first if first in PATHS else "other", str(status)).inc()

    def record_search(self, seconds: float) -> None:
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        """All metrics in the format of Prometheus."""
        return prometheus.generate_latest(self._registry)


class Guard:
    """ASGI middleware that checks the host, adds headers, counts answers and hides tracebacks.

    `hosts` are the names allowed in the header Host; None allows any.
    """

    def __init__(self, app: Application, metrics: Metrics, hosts: frozenset[str] | None) -> None:
        self.app, self.metrics, self.hosts = app, metrics, hosts

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *HEADERS]
                self.metrics.count_request(scope["path"], status)
            await send(message)

        if not self._may_call(scope):
            await _answer(send_counted, 421, "another host is asked for; use the address that the server printed.")
            return
        try:
            await self.app(scope, receive, send_counted)
        except Exception:
            logging.getLogger("uvicorn.error").exception("nearfar serve: a request failed")
            if not status:
                await _answer(send_counted, 500, "the search failed; the server's log says why.")

    def _may_call(self, scope: Message) -> bool:
        host = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        return self.hosts is None or name.lower() in self.hosts


async def _answer(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"error": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
