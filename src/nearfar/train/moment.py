"""One step of a run, and what callbacks receive after it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nearfar.data.loading import Batch
from nearfar.losses.annealing import advance
from nearfar.relations.relation import Relation
from nearfar.train.rates import rate_factor, set_rates
from nearfar.train.state import TrainState

__all__ = ["Moment", "take_step"]


@dataclass(frozen=True, eq=False)
class Moment:
    """What a callback receives after a step; all tensors are detached."""

    step: int
    state: TrainState
    embeddings: Tensor
    labels: Tensor
    indices: Tensor
    target: Tensor | Relation
    scalars: dict[str, Tensor]
    lr: float


def take_step(state: TrainState, step: int, batch: Batch) -> Moment:
    """Take a step: set the learning rate, begin a projection if due, update, store the representatives."""
    config, device = state.config, state.machine.device
    factor = rate_factor(config.optimizer, step, config.training.steps)
    set_rates(state.step.optimizer.param_groups, factor)
    state.begin_projection(step)
    x, labels, indices = batch
    labels = labels.to(device, non_blocking=True)
    target = state.target(labels)
    embeddings, scalars = state.step(state.view.render(x, indices, device), target, state.ids(indices))
    state.remember(labels, embeddings)
    advance(state.loss)
    return Moment(step, state, embeddings, labels, indices, target, scalars, factor * config.optimizer.lr)
