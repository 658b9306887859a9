"""Faster steps: the trunk of a network compiled by torch.compile, for training alone."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["faster"]

_used = set[str]()
"""Ways that runs of this process have compiled in."""


def faster(model: Any, how: Literal["kernels", "graphs"]) -> None:
    """Let a network call a compiled form of its trunk where it is trained; evaluation keeps the plain one.

    New kernels take about a minute at the first step, and less where torch finds those of an earlier run in its cache.
    Parameters are used in place, so that optimizers and checkpoints see no difference. Only the trunk is compiled: its
    code is the same object in every run, and a second run in one process compiles nothing.

    Args:
        model: an `Embedder`, before it is prepared.
        how: "kernels" compiles. "graphs" also records the kernels and replays them (a CUDA graph), since a small batch
            takes a GPU less time than Python needs to start its kernels; torch cannot record the network of a second
            run in the same process, which therefore gets kernels.
    """
    if how == "kernels" or _used or not next(model.trunk.parameters()).is_cuda:
        _used.add("kernels")
        model.compiled = (torch.compile(model.trunk, dynamic=False),)
        return
    _used.add("graphs")
    recorded: Any = torch.compile(model.trunk, mode="reduce-overhead", dynamic=False)

    def call(x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # the last step's maps are done with
        maps: Tensor = recorded(x)
        return maps

    model.compiled = (call,)
