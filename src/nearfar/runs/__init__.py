"""The configuration of a run, the parts that it names, and the journal. `nearfar.train` runs it."""

from nearfar.runs.config import Config, Part, load, parse, to_yaml

__all__ = ["Config", "Part", "load", "parse", "to_yaml"]
