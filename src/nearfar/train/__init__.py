"""Training: the loop, its checkpoints, and the folder of a run."""

from nearfar.runs.config import Config, Part, load, parse, to_yaml
from nearfar.train.loop import Callback, Result, fit
from nearfar.train.moment import Moment
from nearfar.train.readings import NotFiniteError
from nearfar.train.run import Run, open_run

__all__ = [
    "Callback",
    "Config",
    "Moment",
    "NotFiniteError",
    "Part",
    "Result",
    "Run",
    "fit",
    "load",
    "open_run",
    "parse",
    "to_yaml",
]
