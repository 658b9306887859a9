"""One step of descent: embed, loss, backward, proximal pull, clip, update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nearfar.batches import Proximal
from nearfar.relations import Relation


@dataclass(frozen=True, eq=False)
class Step:
    """Everything one step needs; calling it moves the parameters once.

    Args:
        machine: the `accelerate.Accelerator` that owns devices, precision and processes.
        model: the prepared network.
        loss: the loss of all processes' rows together, `Gathered`; the gradient of what it learns itself is whole.
        optimiser: the prepared optimiser.
        clip: the longest gradient that is let through, or None.
        proximal: the pull to the last projection, or None.
    """

    machine: Any
    model: nn.Module
    loss: nn.Module
    optimiser: Any
    clip: float | None = None
    proximal: Proximal | None = None

    def __call__(self, x: Tensor, target: Tensor | Relation) -> tuple[Tensor, dict[str, Tensor]]:
        """The embeddings [b, d], detached, and the scalars of the journal, still on their device."""
        embeddings = self.model(x)
        value = self.loss(embeddings.float() if embeddings.dtype != torch.float64 else embeddings, target)
        self.machine.backward(value)
        scalars = {"loss": value}
        if self.proximal is not None:
            self.machine.unscale_gradients()  # fp16 gradients are kept multiplied; the pull is not
            self.proximal.add_gradient()
        if self.clip is not None:
            scalars["gradient"] = self.machine.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return embeddings.detach(), scalars
