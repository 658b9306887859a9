"""pytorch-metric-learning (PML) with faster losses and miners: change the import, and nothing else.

    from nearfar.pml import distances, losses, miners, reducers, regularizers, samplers, testers, trainers, utils

Losses and miners that nearfar computes faster are subclasses of PML's; everything else is PML's own. Where the result
would not be PML's (a subclass, an unknown distance or reducer, collected statistics, an overridden method), PML
computes it. docs/start/from-pml.md lists the classes.
"""

import sys
from importlib import import_module
from typing import Any

from nearfar._utils.extras import need

__version__: str = need("pytorch_metric_learning", "nearfar.pml", "pml").__version__

from nearfar.pml._modules import HERE, Finder

__all__ = [
    "datasets",
    "distances",
    "losses",
    "miners",
    "reducers",
    "regularizers",
    "samplers",
    "testers",
    "trainers",
    "utils",
]

sys.meta_path.insert(0, Finder())  # otherwise PML's files would run a second time under our names


def __getattr__(name: str) -> Any:
    """Import a module on first access, as `from nearfar.pml import losses` does."""
    if name in __all__:
        return import_module(f"{HERE}.{name}")
    raise AttributeError(f"module {HERE!r} has no attribute {name!r}; there are {', '.join(__all__)}.")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
