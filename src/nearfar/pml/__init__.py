"""A drop-in replacement for pytorch-metric-learning (PML): change the import, and nothing else.

    from nearfar.pml import distances, losses, miners, reducers, regularizers, samplers, testers, trainers, utils

Class names, argument names, their order and their defaults are those of PML 2.9, and so are values and gradients,
except where PML is wrong: docs/start/from-pml.md lists each difference. Every loss holds its native recipe
as `loss.robust`. What is not made here is PML's own object, where PML is installed.
"""

from nearfar.pml import (
    datasets,
    distances,
    losses,
    miners,
    reducers,
    regularizers,
    samplers,
    testers,
    trainers,
    utils,
    wrappers,
)

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
    "wrappers",
]
