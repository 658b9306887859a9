"""Read files of weights without running code in them, and load them into a network without its classifier."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["State", "fill", "read_state"]

State = Mapping[str, Tensor]
WRAPPED = ("state_dict", "model", "model_state_dict")
"""Keys under which published files keep the weights, where they keep more."""


def read_state(path: Path) -> State:
    """Read the state dict in a `.safetensors` file or one that `torch.save` wrote; no code in the file is run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds anything but tensors by name.
    """
    if not path.is_file():
        raise FileNotFoundError(f"models: there is no file of weights {path}.")
    try:
        state = _safe(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"models: the weights {path} cannot be read, for they hold more than tensors, which could run code; save a "
            "state_dict."
        ) from None
    except Exception as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ValueError(
            f"models: the weights {path} cannot be read ({reason}); take a .safetensors file, or one that torch.save "
            "wrote of a state_dict."
        ) from None
    inner = next((state[key] for key in WRAPPED if isinstance(state.get(key), Mapping)), state) if state else state
    if not isinstance(inner, Mapping) or not inner or not all(isinstance(value, Tensor) for value in inner.values()):
        raise ValueError(f"models: the weights {path} must be tensors by name; save a state_dict.")
    return {name.removeprefix("module."): value for name, value in inner.items()}


def _safe(path: Path) -> dict[str, Any]:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise ImportError("safetensors is not installed: pip install safetensors") from None
    return dict(load_file(path))


def fill(network: nn.Module, state: State, path: Path | str, classifier: Iterable[str] = ()) -> None:
    """Load a state dict into a network; only keys of `classifier` may be missing on either side.

    Raises:
        ValueError: names or shapes do not fit.
    """
    parts = tuple(f"{name}." for name in classifier)
    known = {name: value for name, value in network.state_dict().items() if not (parts and name.startswith(parts))}
    given = {name: value for name, value in state.items() if not (parts and name.startswith(parts))}
    # files that were published before torch counted batches have no num_batches_tracked
    missing = [name for name in known if name not in given and not name.endswith("num_batches_tracked")]
    strange = [name for name in given if name not in known]
    shaped = [name for name in given if name in known and given[name].shape != known[name].shape]
    for what, names in (("lacks", missing), ("has in addition", strange), ("has in another shape", shaped)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(
                f"models: the weights {path} do not fit the trunk: the file {what} {names[0]}{more}; take the file of "
                "this very network, or save the state_dict of its trunk."
            )
    network.load_state_dict(given, strict=False)
