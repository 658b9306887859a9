"""Save and restore the states of torch's random generators, on the host and on a device."""

from __future__ import annotations

import torch
from torch import Tensor

State = tuple[Tensor, Tensor | None]
"""The state of the generator of the host, and of that of a CUDA device or None."""


def states(device: torch.device) -> State:
    """The states of the generators that computations on `device` draw from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_states(state: State, device: torch.device) -> None:
    """Restore states that `states` returned."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
