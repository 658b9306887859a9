"""A drop-in replacement for pytorch-metric-learning (PML): change the import, and nothing else.

    from nearfar.pml import distances, losses, miners, reducers, regularizers, samplers

Class names, argument names, their order and their defaults are those of PML 2.9, and so are values and gradients,
except where PML is wrong: docs/start/from-pml.md lists each difference. Every loss holds its native recipe
as `loss.robust`.
"""

from nearfar.pml import distances, losses, miners, reducers, regularizers, samplers

__all__ = ["distances", "losses", "miners", "reducers", "regularizers", "samplers"]
