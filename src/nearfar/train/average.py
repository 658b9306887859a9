"""The moving average of a network's weights, which often scores better than the weights of any one step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Average"]


class Average:
    """A copy of a network whose weights are an exponential moving average of its own.

        w̄ ← d w̄ + (1 - d) w, with d = min(decay, (1 + t) / (10 + t)) at step t = 1, 2, ...

    The first steps count for less than `decay` alone would give them, so that the random start is soon forgotten.
    Statistics of batch norms and other buffers are those of the network itself.

    Args:
        model: the network, not wrapped; the copy shares nothing with it.
        decay: from 0 to below 1.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> average = Average(layer, decay=0.99)
    >>> with torch.no_grad():
    ...     before = layer.weight.item()
    ...     _ = layer.weight.add_(1.0)
    >>> average.update()
    >>> round(average.model.weight.item() - before, 4)  # d = 2 / 11
    0.8182
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._source, self.decay, self.steps = model, decay, 0
        self.model = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the network's present weights."""
        self.steps += 1
        part = 1 - min(self.decay, (1 + self.steps) / (10 + self.steps))
        mine, theirs = _floating(self.model), _floating(self._source)
        torch._foreach_lerp_(mine, theirs, part)
        for own, other in zip(self.model.buffers(), self._source.buffers(), strict=True):
            own.copy_(other)

    def state_dict(self) -> dict[str, Any]:
        """The averaged weights and the number of steps taken in."""
        return {"model": self.model.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.model.load_state_dict(state["model"])
        self.steps = int(state["steps"])


def _floating(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters()]
