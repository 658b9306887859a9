"""Open the data set of a configuration."""

from __future__ import annotations

from dataclasses import replace

from nearfar.data import DataSet, open_data
from nearfar.data.pictures import OnCorrupt
from nearfar.data.registry import kind_of
from nearfar.runs.config import Config, DataConfig

__all__ = ["named", "opened"]


def named(config: Config) -> Config:
    """The configuration with the name of its data set, where that is left to the path."""
    spec = config.data
    return replace(config, data=replace(spec, name=spec.name or kind_of(spec.path)))


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
