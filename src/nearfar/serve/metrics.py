"""What `GET /metrics` tells: requests by path and status, times of searches, memory. Needs the extra `serve`."""

from __future__ import annotations

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

__all__ = ["PATHS", "Metrics"]

PATHS = ("/search", "/picture", "/health", "/metrics", "/")
"""The paths that are counted by name; others are counted together, so that nobody can fill the memory with them."""
TIMES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """Counters of one server.

    Args:
        vectors: of the index.
    """

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, vectors: int) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._requests = Counter("nearfar_requests", "Requests answered.", ("path", "status"), registry=self._registry)
        self._seconds = Histogram(
            "nearfar_search_seconds", "Seconds from a whole body to its answer.", buckets=TIMES, registry=self._registry
        )
        Gauge("nearfar_index_vectors", "Vectors in the index.", registry=self._registry).set(vectors)

    def request(self, path: str, status: int) -> None:
        """Count a request."""
        first = "/" + path.lstrip("/").partition("/")[0]
        self._requests.labels(first if first in PATHS else "other", str(status)).inc()

    def searched(self, seconds: float) -> None:
        """Note how long a search took."""
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        """All of it as Prometheus reads it."""
        return generate_latest(self._registry)
