"""What PML wraps around a loss or a miner, gathered in one place; in PML these names lie in `losses` and `utils`."""

from importlib import import_module
from typing import Any

__all__: list[str] = []

_HOMES = {
    "BaseLossWrapper": "losses",
    "CrossBatchMemory": "losses",
    "MultipleLosses": "losses",
    "SelfSupervisedLoss": "losses",
    "DistributedLossWrapper": "utils.distributed",
    "DistributedMinerWrapper": "utils.distributed",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(_HOMES)}.")
    return getattr(import_module(f"nearfar.pml.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
