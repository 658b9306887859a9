"""Engines: evaluate a loss and its gradient; `dense` is the reference, `tiled` needs less memory, `fused` a GPU."""

from nearfar.engines.dense import dense_pairs, dense_value
from nearfar.engines.distances import distance_rows, widen
from nearfar.engines.fused import fused_way, has_triton, plain_parts
from nearfar.engines.fused_auto import fused_with_again, worth_fusing
from nearfar.engines.fused_finish import fused_value
from nearfar.engines.learned import lift
from nearfar.engines.listed import listed_value, takes_lists
from nearfar.engines.tiled import Tiling, check_tiled, tiled_value, untiled, worth_tiling

__all__ = [
    "Tiling",
    "check_tiled",
    "dense_pairs",
    "dense_value",
    "distance_rows",
    "fused_value",
    "fused_way",
    "fused_with_again",
    "has_triton",
    "lift",
    "listed_value",
    "plain_parts",
    "takes_lists",
    "tiled_value",
    "untiled",
    "widen",
    "worth_fusing",
    "worth_tiling",
]
