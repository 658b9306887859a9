"""Engines: evaluate a loss and its gradient; `dense` is the reference, `tiled` needs less memory and time."""

from nearfar.engines.dense import dense_pairs, dense_value
from nearfar.engines.tiled import Tiling, check_tiled, tiled_value, untiled, worth_tiling

__all__ = ["Tiling", "check_tiled", "dense_pairs", "dense_value", "tiled_value", "untiled", "worth_tiling"]
