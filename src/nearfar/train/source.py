"""The data that a configuration names."""

from __future__ import annotations

from nearfar.data import DataSet, open_data
from nearfar.data.pictures import OnCorrupt
from nearfar.runs.config import DataConfig

__all__ = ["opened"]


def opened(spec: DataConfig, on_corrupt: OnCorrupt | None = None) -> DataSet:
    """Open it as the configuration says; `on_corrupt` goes before what stands there."""
    return open_data(spec.name, spec.path, on_corrupt=on_corrupt or spec.on_corrupt, outside=spec.outside)
