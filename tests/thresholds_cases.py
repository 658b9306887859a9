"""Tables of thresholds for tests that bring small batches to an engine."""

from __future__ import annotations

from nearfar.engines.thresholds import GENERAL, SCOPES, Thresholds


def table_of(fast: int, general: int) -> dict[str, Thresholds]:
    """The same thresholds on every device: of losses with a fast path in the tiled engine, and of the others."""
    scopes = {scope: {"tiled": general if scope == GENERAL else fast} for scope in SCOPES}
    return {"cpu": Thresholds(scopes), "cuda": Thresholds(scopes)}
