"""Training: the loop, its checkpoints, and the folder of a run."""

from nearfar.runs._config import load, parse, to_yaml
from nearfar.runs._sections import Config, Part
from nearfar.train._dry_run import dry_run
from nearfar.train._loop import Callback, Result, fit
from nearfar.train._progress import NotFiniteError
from nearfar.train._run import Run, open_run
from nearfar.train._state import Moment

__all__ = [
    "Callback",
    "Config",
    "Moment",
    "NotFiniteError",
    "Part",
    "Result",
    "Run",
    "dry_run",
    "fit",
    "load",
    "open_run",
    "parse",
    "to_yaml",
]
