"""Open the data set of a configuration."""

from __future__ import annotations

from nearfar.data import DataSet, open_data
from nearfar.data.pictures import OnCorrupt
from nearfar.runs.config import DataConfig

__all__ = ["opened"]


def opened(spec: DataConfig, on_corrupt: OnCorrupt | None = None) -> DataSet:
    """Open the data set as the configuration says; `on_corrupt`, if given, takes precedence."""
    return open_data(
        spec.name,
        spec.path,
        labels=spec.labels,
        inputs=spec.inputs,
        on_corrupt=on_corrupt or spec.on_corrupt,
        outside=spec.outside,
    )
