"""`TrainState`: data, network, loss, optimizer and sampler of a run, built from its configuration."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from nearfar._utils.files import lies_in
from nearfar._utils.process_group import gather_objects
from nearfar.batches import Proximal, Representatives
from nearfar.data import DataSet, Samples, View
from nearfar.data.picture_cache import cache_data
from nearfar.data.samples import Transform
from nearfar.data.splits import Shares
from nearfar.distributed import CrossBatchMemory, Distributed
from nearfar.relations.relation import Relation
from nearfar.runs import parts
from nearfar.runs.config import Config
from nearfar.train.average import Average
from nearfar.train.faster import faster
from nearfar.train.rates import optimizer
from nearfar.train.room import check_memory
from nearfar.train.sharded import Sharded
from nearfar.train.source import opened
from nearfar.train.step import Step
from nearfar.train.suited import Input, open_model, shares_of, split

__all__ = ["TrainState", "prepare", "seed_everything", "takes_relations"]


@dataclass(frozen=True, eq=False)
class TrainState:
    """The parts of a run."""

    config: Config
    machine: Any
    data: DataSet
    train: Samples
    validation: Samples | None
    model: nn.Module
    loss: Any
    sampler: Any
    step: Step
    view: View
    plain: Transform
    inputs: Input
    shares: Shares
    sharded: Sharded | None = None

    @property
    def bare_model(self) -> nn.Module:
        """The network without the wrappers of DDP and mixed precision; of one in shards, the copy last gathered."""
        if self.sharded is not None:
            return self.sharded.whole
        model: nn.Module = self.machine.unwrap_model(self.model)
        return model

    @property
    def scored_model(self) -> nn.Module:
        """The network that is scored and kept: the moving average of the weights, where there is one."""
        return self.bare_model if self.step.average is None else self.step.average.model

    @property
    def evaluating(self) -> dict[str, Any]:
        """The options for embedding samples in an evaluation."""
        return {"device": self.machine.device, "workers": self.config.data.workers, "hold": self.hold}

    @property
    def hold(self) -> bool:
        """Whether samples are held on the device."""
        return _holds(self.config, self.machine.device)

    @functools.cached_property
    def mask(self) -> Tensor:
        """Mask [b] of the representatives of a batch; the same for every batch, so it is moved to the device once."""
        mask: Tensor = self.sampler.mask.to(self.machine.device)
        return mask

    def begin_projection(self, step: int) -> None:
        """At the first step of a projection, anchor the proximal term at the current parameters."""
        proximal = self.step.proximal
        if proximal is None:
            return
        if step == 1 or (isinstance(self.sampler, Representatives) and self.sampler.is_new_projection(step - 1)):
            proximal.anchor()

    def remember(self, labels: Tensor, embeddings: Tensor) -> None:
        """Update the table of hard classes with this batch's representatives, those of all ranks."""
        if not isinstance(self.sampler, Representatives) or self.sampler.hard_classes is None:
            return
        chosen = self.mask
        mine = (labels[chosen].cpu(), embeddings[chosen].float().cpu())
        for theirs in gather_objects("train", mine):
            self.sampler.update(*theirs)

    def ids(self, indices: Tensor) -> Tensor | None:
        """Sample ids of a batch, if the loss has a memory: no row is paired with its own past."""
        return indices.to(self.machine.device) if isinstance(self.loss, CrossBatchMemory) else None

    def target(self, labels: Tensor) -> Tensor | Relation:
        """The target of the loss: labels, or in a projection the relation of pairs with a representative."""
        if not isinstance(self.sampler, Representatives) or not takes_relations(self.loss):
            return labels
        return Relation.from_labels(labels, representatives=self.mask)


def takes_relations(loss: Any) -> bool:
    """Whether a loss takes relations: proxy losses do not, since they compare samples with proxies."""
    return not hasattr(loss, "proxies")


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (users' code may draw from it)
    torch.manual_seed(seed)


def prepare(
    config: Config, machine: Any, data: DataSet | None = None, *, fresh: bool = True, console: Console | None = None
) -> TrainState:
    """Read the data, build network, loss and optimizer, and prepare them; `fresh` as in `open_model`."""
    seed_everything(seed := config.training.seed)
    given = data or opened(config.data)
    shares, inputs = shares_of(config, given), Input.of(config, given)
    bare, augmented, plain = open_model(config, inputs, fresh=fresh)
    check_memory(config, shares.learn, inputs, bare, machine)
    given = _cached(config, given, plain, machine.device, console)
    train, validation = split(config, given.train, shares)
    loss = parts.make_loss(config, classes=len(train.classes), dim=bare.embedding_dim)
    sharded = _placed(bare, machine, config.training.shard)
    average = Average(bare, config.training.average) if config.training.average else None
    if config.training.compile != "none":
        faster(bare, config.training.compile)
    # not prepared: it computes in full precision, of all processes' rows together
    loss.to(device=machine.device, dtype=next(bare.parameters()).dtype)
    moves = optimizer(config.optimizer, bare, loss, machine.device)
    proximal = Proximal(bare.parameters(), config.optimizer.proximal) if config.optimizer.proximal else None
    model = machine.prepare_model(bare) if sharded is None else sharded.model
    sampler = parts.make_sampler(config, train.labels, rank=machine.process_index, world=machine.num_processes)
    seed_everything(seed + machine.process_index)  # ranks start from equal weights and drop out different units
    return TrainState(
        config=config,
        machine=machine,
        data=given,
        train=train,
        validation=validation,
        model=model,
        loss=loss,
        sampler=sampler,
        step=Step(
            machine,
            model,
            Distributed(loss),
            moves,
            config.optimizer.max_grad_norm,
            proximal,
            config.training.chunk,
            config.model.freeze_norms,
            average,
        ),
        view=View(train, augmented, seed=seed, device=machine.device if _holds(config, machine.device) else None),
        plain=plain,
        inputs=inputs,
        shares=shares,
        sharded=sharded,
    )


def _placed(model: nn.Module, machine: Any, shard: bool) -> Sharded | None:
    """Move a network to its device, in shards if wanted; on a GPU weights lie as tensor cores read them."""
    model.to(machine.device)
    if shard:
        return Sharded(model, machine)  # cut from plain layouts
    if machine.device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return None


def _holds(config: Config, device: torch.device) -> bool:
    """Whether samples are to be held on the device; on a CPU they are in memory anyway."""
    return config.data.cache == "device" and device.type != "cpu"


def _cached(config: Config, data: DataSet, plain: Transform, device: torch.device, console: Console | None) -> DataSet:
    """The data with pictures that are decoded once, if the configuration says so."""
    spec = config.data
    cache = "memory" if spec.cache == "device" and device.type == "cpu" else spec.cache
    folder = None if spec.cache_folder is None else Path(spec.cache_folder)
    if folder is not None and spec.path is not None and lies_in(folder, Path(spec.path)):
        raise ValueError(
            f"config: data.cache_folder must lie outside the data, but {folder} is in {spec.path}; name another one, "
            "or leave it out."
        )
    return cache_data(data, plain, cache, folder=folder, console=console)
