"""Faster steps: the trunk of a network compiled by torch.compile, for training alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["faster"]


def faster(model: Any) -> None:
    """Let a network call a compiled form of its trunk where it is trained; evaluation keeps the plain one.

    New kernels take about a minute at the first step, and less where torch finds those of an earlier run in its cache.
    On a GPU they are recorded and replayed (a CUDA graph), since a small batch takes less time than Python needs to
    start its kernels. Parameters are used in place, so that optimizers and checkpoints see no difference. Only the
    trunk is compiled: its code is the same object in every run, and a second run in one process compiles nothing.

    Args:
        model: an `Embedder`, before accelerate prepares it.
    """
    if not next(model.trunk.parameters()).is_cuda:
        model.compiled = (torch.compile(model.trunk, dynamic=False),)
        return
    recorded: Any = torch.compile(model.trunk, mode="reduce-overhead", dynamic=False)

    def call(x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # the last step's maps are done with
        maps: Tensor = recorded(x)
        return maps

    model.compiled = (call,)
