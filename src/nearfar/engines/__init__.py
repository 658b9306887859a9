"""Engines: evaluate a loss and its gradient; `dense` is the reference, `tiled` needs less memory and time."""

from nearfar.engines.dense import dense_pairs, dense_value
from nearfar.engines.listed import listed_value, takes_lists
from nearfar.engines.tiled import Tiling, check_tiled, tiled_value, untiled, worth_tiling

__all__ = [
    "Tiling",
    "check_tiled",
    "dense_pairs",
    "dense_value",
    "listed_value",
    "takes_lists",
    "tiled_value",
    "untiled",
    "worth_tiling",
]
