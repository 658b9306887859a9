"""Checkpoints of a run, and the states of the random generators that they hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from nearfar._utils.checkpoint import BEST, FORMAT, LAST, first_line, load, save

__all__ = ["BEST", "FORMAT", "LAST", "first_line", "load", "random_state", "save", "set_random_state"]


def random_state() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, in types that `weights_only` reads."""
    python = random.getstate()
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002  (users' code may draw from it)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [python[0], list(python[1]), python[2]],
        "numpy": [torch.from_numpy(np.asarray(keys, dtype=np.int64)), int(position), int(has_gauss), float(gauss)],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the states of the generators."""
    torch.set_rng_state(state["torch"].cpu())
    version, inner, gauss = state["python"]
    random.setstate((version, tuple(inner), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
