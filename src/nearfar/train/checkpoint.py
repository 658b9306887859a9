"""Checkpoints: whole or not at all, plain values and tensors only, read with `weights_only=True`."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearfar._files import whole

FORMAT = 1


def save(path: Path, state: dict[str, Any]) -> None:
    """Write to a temporary name, then rename: a full disk or a kill leaves the last checkpoint as it was."""
    with whole(path) as temporary:
        torch.save({"format": FORMAT, **state}, temporary)


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint; nothing in it can run code.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or of another format.
    """
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint: there is no {path}; train first, or name another run.")
    kind = torch.device(device)
    try:
        # a single rank on a CPU calls its device cpu:0, which torch saves but cannot load
        state: dict[str, Any] = torch.load(path, map_location="cpu" if kind.type == "cpu" else kind, weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"checkpoint: {path} cannot be read ({first[:120]}); take another one.") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"checkpoint: {path} was not written by this version of nearfar; train again.")
    return state


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
    """Put the generators back."""
    torch.set_rng_state(state["torch"].cpu())
    version, inner, gauss = state["python"]
    random.setstate((version, tuple(inner), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
