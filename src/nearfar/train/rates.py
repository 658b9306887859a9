"""The optimizer: its parameter groups, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nearfar.runs.config import OptimizerConfig

__all__ = ["optimizer", "rate_factor", "set_rates"]


def optimizer(config: OptimizerConfig, model: Any, loss: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Build Adam, AdamW or SGD over trunk, head (lr x `head_lr_mult`) and the loss's parameters (lr x `loss_lr_mult`).

    Weight decay applies only to parameters of two or more dimensions: not to biases, norms or thresholds.
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
    """The factor of the learning rate at step 1..steps: linear warm-up, then constant or half a cosine toward 0.

    >>> [round(rate_factor(OptimizerConfig(warmup=2), step, 6), 3) for step in (1, 2, 3, 4, 6)]
    [0.5, 1.0, 1.0, 0.854, 0.146]
    """
    if step <= config.warmup:
        return step / config.warmup
    if config.schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - config.warmup - 1) / (steps - config.warmup)))


def set_rates(groups: Iterable[dict[str, Any]], factor: float) -> None:
    """Set the learning rate of each group: the group's own one times the factor of the schedule."""
    for group in groups:
        group["lr"] = group["factor"] * factor
