"""Engines: the same numbers at different costs. `dense` is the readable reference that all others are held to."""

from nearfar.engines.dense import dense_pairs, dense_value

__all__ = ["dense_pairs", "dense_value"]
