"""Checkpoints: written atomically, sealed, plain values and tensors only, read with `weights_only=True`."""

import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from nearfar._utils.files import check_seal, first_line, sealed

FORMAT = 2  # version of the format; version 1 had neither seal nor configuration
LAST = ("step", "config", "model", "loss", "optimizer", "sampler", "proximal", "scaler", "random", "best", "lines")
"""Keys of `last.pt`."""
BEST = ("step", "config", "model", "score", "inputs")  # keys of `best.pt`


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically: after a full disk or a kill, the last checkpoint is still intact."""
    with sealed(path) as temporary:
        torch.save({"format": FORMAT, **state}, temporary)


def load(path: Path, needs: Collection[str]) -> dict[str, Any]:
    """Read a checkpoint to the CPU; it cannot run code, and a damaged one is an error.

    Args:
        path: the file.
        needs: the required keys, `LAST` or `BEST`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or keys are missing.
    """
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint: there is no {path}; train first, or name another run.")
    try:
        check_seal("checkpoint", path, needed=True)
    except ValueError:
        raise ValueError(
            f"checkpoint: {path} cannot be read: it is cut short or damaged, or of an older version of nearfar, "
            "which wrote no seal; take another one, or train again."
        ) from None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"checkpoint: {path} cannot be read ({first_line(error)}); take another one.") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"checkpoint: {path} is of another format than {FORMAT}, that of this nearfar; train again.")
    missing = [key for key in needs if key not in state]
    if missing or not isinstance(state["step"], int) or not isinstance(state["config"], dict):
        what = f"lacks {', '.join(missing)}" if missing else "has no whole step or no configuration"
        raise ValueError(f"checkpoint: {path} {what}; take another one, or train again.")
    return state
