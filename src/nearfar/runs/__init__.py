"""The configuration of a run, the parts that it names, and the journal. `nearfar.train` runs it."""

from nearfar.runs._config import load, parse, to_yaml
from nearfar.runs._sections import Config, Part

__all__ = ["Config", "Part", "load", "parse", "to_yaml"]
