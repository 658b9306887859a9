"""One training step and its parts: the optimizer, the learning-rate schedule, the average of the weights."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nearfar.batches import Proximal
from nearfar.distributed import cached_step
from nearfar.losses.spread import spread, spread_bound
from nearfar.relations.relation import Relation
from nearfar.runs._sections import Config, OptimizerConfig


@dataclass(frozen=True, eq=False)
class Step:
    """A training step as a callable: each call embeds a batch, back-propagates the loss and updates all parameters."""

    config: Config  # the configuration: clipping, chunks and whether batch norms keep their statistics
    # an `accelerate.Accelerator` or a `SingleProcess`; it knows the device, the precision and the processes
    machine: Any
    model: nn.Module  # the prepared network
    loss: nn.Module  # a `Distributed` loss; the gradient of its own parameters is complete on every rank
    optimizer: Any  # the optimizer of the parameters of network and loss
    proximal: Proximal | None = None
    average: Average | None = None

    def __call__(
        self, x: Tensor, target: Tensor | Relation, ids: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Take a step; return the detached embeddings [b, d], and the scalars for the journal, on their device.

        `ids` [b] are the sample ids, for a loss with a memory.
        """
        embeddings, value = self.backward(x, target, ids)
        scalars = {"loss": value, **_spread_scalars(self.loss, embeddings, value)}
        scaler = self.machine.scaler
        if scaler is not None:
            scaler.unscale_(self.optimizer)  # the proximal term and the clipping need unscaled gradients
        if self.proximal is not None:
            self.proximal.add_gradient()
        if self.config.optimizer.max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
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

    def backward(self, x: Tensor, target: Tensor | Relation, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute embeddings and loss, and back-propagate to all parameters."""
        seen = list[Tensor]()

        def compute_loss(embeddings: Tensor, target: Tensor | Relation) -> Tensor:
            seen.append(embeddings.detach())
            exact = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
            value: Tensor = self.loss(exact, target, ids=ids)
            return value

        scaler, chunk = self.machine.scaler, self.config.training.chunk
        if chunk is None:
            value = compute_loss(self.model(x), target)
            (value if scaler is None else scaler.scale(value)).backward()
        else:
            norms: Literal["refuse", "frozen"] = "frozen" if self.config.model.freeze_norms else "refuse"
            value = cached_step(self.model, x, target, compute_loss, chunk, bn=norms, scaler=scaler)
        return seen[0], value


def _spread_scalars(loss: Any, embeddings: Tensor, value: Tensor) -> dict[str, Tensor]:
    """The spread V of a batch and the least V that its value F allows, κ·exp(-F/w), for a loss with a floor κ.

    With several processes V is that of this one's rows, and the bound is that of all rows.
    """
    if (known := getattr(loss, "spread_floor", None)) is None:
        return {}
    return {
        "pair spread V": spread(embeddings.float()),
        "pair spread bound": spread_bound(value.detach(), *known),
    }


def make_optimizer(config: OptimizerConfig, model: Any, loss: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Build Adam, AdamW or SGD over trunk, head (lr x `head_lr_mult`) and the loss's parameters (lr x `loss_lr_mult`).

    Weight decay applies only to parameters of two or more dimensions: not to biases, norms or thresholds.
    """
    groups = []
    for module, factor, decay in (
        (model.trunk, 1.0, config.weight_decay),
        (model.head, config.head_lr_mult, config.weight_decay),
        (loss, config.loss_lr_mult, 0.0),
    ):
        trainable = [p for p in module.parameters() if p.requires_grad]
        matrices, vectors = [p for p in trainable if p.ndim >= 2], [p for p in trainable if p.ndim < 2]
        for parameters, weight_decay in ((matrices, decay), (vectors, 0.0)):
            if parameters:
                groups.append({"params": parameters, "factor": factor * config.lr, "weight_decay": weight_decay})
    if not groups:
        raise ValueError("train: the model has nothing to learn; choose a head, or do not freeze every parameter.")
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    # One kernel for all parameters of a GPU; on a CPU the plain form keeps a run the same on every build.
    return kind(groups, lr=config.lr, betas=config.betas, fused=device.type == "cuda" or None)


def lr_factor(config: OptimizerConfig, step: int, steps: int) -> float:
    """The factor of the learning rate at step 1..steps: linear warm-up, then the schedule.

    >>> [round(lr_factor(OptimizerConfig(warmup=2), step, 6), 3) for step in (1, 2, 3, 4, 6)]
    [0.5, 1.0, 1.0, 0.854, 0.146]
    >>> [round(lr_factor(OptimizerConfig(schedule="stable"), step, 8), 3) for step in (1, 6, 7, 8)]
    [1.0, 1.0, 0.667, 0.333]
    """
    if step <= config.warmup:
        return step / config.warmup
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "stable":
        fall = steps // 4
        return min(1.0, (steps - step + 1) / (fall + 1))
    return 0.5 * (1 + math.cos(math.pi * (step - config.warmup - 1) / (steps - config.warmup)))


class Average:
    """An exponential moving average of a network's weights, which often scores better than the weights of any one step.

        w̄ ← d w̄ + (1 - d) w, with d = min(decay, (1 + t) / (10 + t)) at step t = 1, 2, ...

    The smaller d of the first steps makes the average forget the random initialization quickly. Batch norm statistics
    and other buffers are copied from the network, which is given without wrappers.

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
        self.steps += 1
        weight = 1 - min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(list(self.model.parameters()), [p.detach() for p in self._source.parameters()], weight)
        for own, other in zip(self.model.buffers(), self._source.buffers(), strict=True):
            own.copy_(other)

    def state_dict(self) -> dict[str, Any]:
        """The averaged weights and the number of updates."""
        return {"model": self.model.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        self.steps = int(state["steps"])
