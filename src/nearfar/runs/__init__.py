"""A run on paper: its configuration, the parts that it names, and its journal. `nearfar.train` makes it happen."""

from nearfar.runs.config import Config, Part, load, parse, to_yaml

__all__ = ["Config", "Part", "load", "parse", "to_yaml"]
