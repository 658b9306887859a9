"""Engines: evaluate a loss and its gradient. `dense` is the reference; all others give the same numbers."""

from nearfar.engines.auto import by_list, by_other_engine, check_strips
from nearfar.engines.dense import dense_pairs, dense_value
from nearfar.engines.distances import distance_rows
from nearfar.engines.plan import Plan, make_plan, plain_parts

__all__ = [
    "Plan",
    "by_list",
    "by_other_engine",
    "check_strips",
    "dense_pairs",
    "dense_value",
    "distance_rows",
    "make_plan",
    "plain_parts",
]
