"""`Records`: modules that remember numbers of their last call, for those who log them; PML's `collect_stats`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn

__all__ = ["Records", "collects"]


def collects(given: bool | None) -> bool:
    """Whether statistics are kept: as given, else as PML's global switch says where PML is loaded, else not."""
    if given is not None:
        return bool(given)
    switch = sys.modules.get("pytorch_metric_learning.utils.common_functions")
    return bool(getattr(switch, "COLLECT_STATS", False))


class Records(nn.Module):
    """A module with statistics of its last call.

    Attributes:
        collect_stats: whether statistics are computed; they read values, which on a GPU waits for it.
    """

    stats: tuple[str, ...] = ()
    """Names of the statistics that a call sets."""

    def __init__(self, collect_stats: bool | None = None) -> None:
        super().__init__()
        self.collect_stats = collects(collect_stats)
        self._record_these: list[str] = []  # the names that PML's logging reads
        self._record_these_stats: list[str] = []
        self.add_to_recordable_attributes(list_of_names=self.stats, is_stat=True)

    def add_to_recordable_attributes(
        self, name: str | None = None, list_of_names: Sequence[str] | None = None, is_stat: bool = False
    ) -> None:
        """Name attributes that are logged; a statistic is named only where statistics are collected, and begins at 0.

        Args:
            name: one attribute.
            list_of_names: further ones.
            is_stat: they are statistics of a call, which `reset_stats` sets to 0; else settings.
        """
        if is_stat and not self.collect_stats:
            return
        known = self._record_these_stats if is_stat else self._record_these
        for one in [*([] if name is None else [name]), *(list_of_names or ())]:
            if one not in known:
                known.append(one)
            if not hasattr(self, one):
                setattr(self, one, 0)

    def reset_stats(self) -> None:
        """Set all statistics to 0."""
        for name in self._record_these_stats:
            setattr(self, name, 0)
