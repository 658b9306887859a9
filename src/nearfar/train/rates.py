"""The optimizer: its groups of parameters, and the rate at each step as a plain function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nearfar.runs.config import OptimizerConfig

__all__ = ["optimizer", "rate_factor", "set_rates"]


def optimizer(config: OptimizerConfig, model: Any, loss: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Adam, AdamW or SGD over trunk, head (rate x `head`) and the loss's own parameters (rate x `loss`).

    Weight decay touches parameters of two or more dimensions alone: not biases, not norms, not thresholds.
    """
    groups = []
    for name, module, factor in (
        ("trunk", model.trunk, 1.0),
        ("head", model.head, config.head_lr_mult),
        ("loss", loss, config.loss_lr_mult),
    ):
        decay = 0.0 if name == "loss" else config.weight_decay
        learning = [p for p in module.parameters() if p.requires_grad]
        for part, weight in (((p for p in learning if p.ndim >= 2), decay), ((p for p in learning if p.ndim < 2), 0.0)):
            parameters = list(part)
            if parameters:
                groups.append({"params": parameters, "factor": factor * config.lr, "weight_decay": weight})
    if not groups:
        raise ValueError("train: the model has nothing to learn; choose a head, or do not freeze every parameter.")
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    # One kernel for all parameters of a GPU; on a CPU the plain form keeps a run the same on every build.
    return kind(groups, lr=config.lr, betas=config.betas, fused=device.type == "cuda" or None)


def rate_factor(config: OptimizerConfig, step: int, steps: int) -> float:
    """What the rate is multiplied with at step 1..steps: linear warm-up, then constant or half a cosine down.

    >>> [round(rate_factor(OptimizerConfig(warmup=2), step, 6), 3) for step in (1, 2, 3, 4, 6)]
    [0.5, 1.0, 1.0, 0.854, 0.146]
    """
    if step <= config.warmup:
        return step / config.warmup
    if config.schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - config.warmup - 1) / (steps - config.warmup)))


def set_rates(groups: Iterable[dict[str, Any]], factor: float) -> None:
    """Give each group its rate: the group's own factor times the schedule's."""
    for group in groups:
        group["lr"] = group["factor"] * factor
