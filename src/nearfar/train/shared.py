"""Evaluations during training are shared by all ranks: each embeds some batches, and searches among some rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nearfar._utils.process_group import Group, ProcessGroup
from nearfar.evaluation.parallel import split_over
from nearfar.train.state import TrainState

__all__ = ["shared"]


@contextmanager
def shared(state: TrainState, model: nn.Module) -> Iterator[None]:
    """Share the evaluations within the block among the ranks of a run, with the first rank's network on all of them.

    Gradients are the same on all ranks, and so are weights; running means of batch norms are those of a rank's own rows
    until DDP copies the first rank's at the next step, as is done here.
    """
    if state.machine.num_processes == 1:
        yield
        return
    group = Group("train")
    _copy(model, group)
    with split_over(group):
        yield


@torch.no_grad()
def _copy(model: nn.Module, group: ProcessGroup) -> None:
    for value in model.state_dict().values():
        if isinstance(value, Tensor):
            first = group.copy_from(0, value.detach().clone(memory_format=torch.contiguous_format))
            if group.rank:
                value.copy_(first)
