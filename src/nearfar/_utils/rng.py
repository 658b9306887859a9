"""Save and restore the states of torch's random generators, on the host and on a device."""

from typing import Any

import torch
from torch import Tensor

State = tuple[Tensor, Tensor | None]
"""The state of the generator of the host, and of that of a device or None if the device is the host."""


def states(device: torch.device) -> State:
    """The states of the generators that computations on `device` draw from; `device`, not the current one."""
    module = _module(device)
    return torch.get_rng_state(), None if module is None else module.get_rng_state(*_index(device))


def set_states(state: State, device: torch.device) -> None:
    """Restore states that `states` returned."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        _module(device).set_rng_state(state[1], *_index(device))


def _module(device: torch.device) -> Any:
    """The torch module of this device type, such as `torch.cuda`; None if it has no generator of its own."""
    found = None if device.type == "cpu" else getattr(torch, device.type, None)
    return found if hasattr(found, "get_rng_state") else None


def _index(device: torch.device) -> tuple[torch.device, ...]:
    """Arguments that name the device; empty for torch.mps, which takes none."""
    return () if device.type == "mps" else (device,)
