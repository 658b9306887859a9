"""One training step: embed, loss, backward, proximal term, clip, update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nearfar.batches import Proximal
from nearfar.distributed import cached_step
from nearfar.relations.relation import Relation
from nearfar.train.average import Average

__all__ = ["Step"]


@dataclass(frozen=True, eq=False)
class Step:
    """A training step as a callable: each call updates the parameters once.

    Args:
        machine: the `accelerate.Accelerator` that owns devices, precision and processes, or `Alone`.
        model: the prepared network.
        loss: the loss over the rows of all processes, `Distributed`; the gradient of its own parameters is complete.
        optimizer: of the parameters of network and loss.
        clip: the largest gradient norm, or None.
        chunk: samples that the network processes at a time, or None for the whole batch.
        frozen: whether the network's batch norms keep their statistics.
        proximal: the proximal term, or None.
        average: the moving average of the weights, or None.
    """

    machine: Any
    model: nn.Module
    loss: nn.Module
    optimizer: Any
    clip: float | None = None
    proximal: Proximal | None = None
    chunk: int | None = None
    frozen: bool = False
    average: Average | None = None

    def __call__(
        self, x: Tensor, target: Tensor | Relation, ids: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Take a step; return the embeddings [b, d], detached, and the scalars of the journal, on their device.

        `ids` [b] are the sample ids, for a loss with a memory.
        """
        embeddings, value = self.gradient(x, target, ids)
        scalars = {"loss": value}
        scaler = self.machine.scaler
        if scaler is not None:
            scaler.unscale_(self.optimizer)  # fp16 gradients are kept multiplied; pull and norm are not
        if self.proximal is not None:
            self.proximal.add_gradient()
        if self.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            scalars["gradient"] = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update()
        return embeddings, scalars

    def gradient(self, x: Tensor, target: Tensor | Relation, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute embeddings and loss, and back-propagate to all parameters."""
        seen = list[Tensor]()

        def judge(embeddings: Tensor, target: Tensor | Relation) -> Tensor:
            seen.append(embeddings.detach())
            exact = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
            value: Tensor = self.loss(exact, target, ids=ids)
            return value

        if self.chunk is None:
            value = judge(self.model(x), target)
            scaler = self.machine.scaler
            (value if scaler is None else scaler.scale(value)).backward()
        else:
            norms: Literal["refuse", "frozen"] = "frozen" if self.frozen else "refuse"
            value = cached_step(self.model, x, target, judge, self.chunk, bn=norms, scaler=self.machine.scaler)
        return seen[0], value
