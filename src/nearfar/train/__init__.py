"""Training: the loop, its checkpoints, and the folder of a run."""

from nearfar.runs.config import Config, Part, load, parse, to_yaml
from nearfar.train.loop import Callback, Result, fit
from nearfar.train.progress import NotFiniteError
from nearfar.train.run import Run, open_run
from nearfar.train.state import Moment

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
