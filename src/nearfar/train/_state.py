"""`TrainState`: data, network, loss, optimizer and sampler of a run, built from its configuration; and its steps."""

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nearfar._utils.files import lies_in
from nearfar._utils.process_group import gather_objects
from nearfar.batches import Proximal, QueryPairs, Representatives, violations
from nearfar.data import DataSet, Samples, View
from nearfar.data._loading import Batch, collate
from nearfar.data._picture_cache import cache_data
from nearfar.data._samples import Transform
from nearfar.data._splits import Shares
from nearfar.distributed import CrossBatchMemory, Distributed
from nearfar.losses.annealing import advance
from nearfar.relations.relation import Relation
from nearfar.runs import _parts as parts
from nearfar.runs._sections import Config
from nearfar.train._build import Input, build_model, check_memory, class_shares, compile_trunk, open_dataset, split
from nearfar.train._pairs import QueriesToDocuments
from nearfar.train._sharded import Sharded
from nearfar.train._step import Average, Step, lr_factor, make_optimizer


@dataclass(frozen=True, eq=False)
class TrainState:
    """Everything that a run needs to take steps."""

    config: Config  # the configuration
    machine: Any  # the `accelerate.Accelerator` or `SingleProcess`
    data: DataSet  # the data set
    train: Samples  # the samples of the training classes
    validation: Samples | None  # the samples of the held-out classes, if any
    model: nn.Module  # the network, prepared for its processes and precision
    loss: Any  # the loss, over this process's rows
    sampler: Any  # the batch sampler
    step: Step  # the training step
    view: View  # the augmented training samples
    plain: Transform  # the transform of evaluation
    inputs: Input  # the shape and transform of the network's input
    shares: Shares  # how many classes are for training, validation and the test
    sharded: Sharded | None = None  # the network in shards, if it is split over the processes

    @property
    def bare_model(self) -> nn.Module:
        """The network without the wrappers of DDP and mixed precision; if sharded, the last gathered copy."""
        if self.sharded is not None:
            return self.sharded.whole
        model: nn.Module = self.machine.unwrap_model(self.model)
        return model

    @property
    def scored_model(self) -> nn.Module:
        """The network that is scored and saved: the moving average of the weights if there is one."""
        return self.bare_model if self.step.average is None else self.step.average.model

    @property
    def evaluating(self) -> dict[str, Any]:
        """The options for embedding samples in an evaluation."""
        hold = _holds_samples(self.config, self.machine.device)
        return {"device": self.machine.device, "workers": self.config.data.workers, "hold": hold}

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
        """Tell the sampler of this batch on all ranks: rows of its hard classes, and the largest violation."""
        sampler = self.sampler
        if not isinstance(sampler, Representatives) or (sampler.hard_classes is None and not sampler.converged):
            return
        rows = torch.ones_like(self.mask) if sampler.converged else self.mask
        mine = (labels[rows].cpu(), embeddings[rows].float().cpu(), self.mask[rows].cpu())
        y, x, chosen = (torch.cat(column) for column in zip(*gather_objects("train", mine), strict=True))
        sampler.update(y[chosen], x[chosen])
        if sampler.converged:
            pairs = Relation.from_labels(y, representatives=None if sampler.all_pairs else chosen)
            near, far = self.config.training.max_positive_distance, self.config.training.min_negative_distance
            found = violations(x, pairs, max_positive_distance=near, min_negative_distance=far)
            sampler.report(found.largest)

    def ids(self, indices: Tensor) -> Tensor | None:
        """Sample ids of a batch if the loss has a memory, which must not pair a sample with its own past."""
        return indices.to(self.machine.device) if isinstance(self.loss, CrossBatchMemory) else None

    def target(self, labels: Tensor) -> Tensor | Relation:
        """The target of the loss: labels, or in a projection the relation of pairs with a representative."""
        if not isinstance(self.sampler, Representatives) or self.sampler.all_pairs:
            return labels
        if hasattr(self.loss, "proxies"):  # which take no relation
            return labels
        return Relation.from_labels(labels, representatives=self.mask)


@dataclass(frozen=True, eq=False)
class Moment:
    """The state of a run after a step, as callbacks receive it; all tensors are detached."""

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
    factor = lr_factor(config.optimizer, step, config.training.length)
    for group in state.step.optimizer.param_groups:
        group["lr"] = group["factor"] * factor
    state.begin_projection(step)
    x, labels, indices = batch
    labels = labels.to(device, non_blocking=True)
    target = state.target(labels)
    embeddings, scalars = state.step(state.view.render(x, indices, device), target, state.ids(indices))
    state.remember(labels, embeddings)
    advance(state.loss)
    return Moment(step, state, embeddings, labels, indices, target, scalars, factor * config.optimizer.lr)


class _NumberedBatches:
    """An endless batch sampler: repeats `sampler`, and pairs each index with the number of its step."""

    def __init__(self, sampler: Any, step: int) -> None:
        self.sampler, self.step = sampler, step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        step = self.step
        while True:
            for batch in self.sampler:
                step += 1
                yield [(index, step) for index in batch]


def load_batches(state: TrainState, after: int = 0, *, workers: int = 0) -> Iterator[tuple[int, Batch]]:
    """Yield (step, batch) for step = after + 1, after + 2, ... without end.

    The sampler continues from its own state; with workers it runs ahead of the training. Augmentation depends on the
    seed, the step and the sample alone.
    """
    loader: DataLoader[Any] = DataLoader(
        state.view,
        batch_sampler=_NumberedBatches(state.sampler, after),
        num_workers=workers,
        collate_fn=collate,
        pin_memory=state.machine.device.type == "cuda",
        generator=torch.Generator(),  # its own, so that loading leaves the generator of dropout alone
    )
    return enumerate(loader, start=after + 1)


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (users' code may draw from it)
    torch.manual_seed(seed)


def prepare(
    config: Config, machine: Any, data: DataSet | None = None, *, fresh: bool = True, console: Console | None = None
) -> TrainState:
    """Open the data, and build the network, the loss, the sampler and the step; `fresh` as in `build_model`."""
    seed_everything(seed := config.training.seed)
    given = data or open_dataset(config.data)
    shares, inputs = class_shares(config, given), Input.of(config, given)
    bare, augmented, plain = build_model(config, inputs, given.train, fresh=fresh)
    check_memory(config, shares.learn, inputs, bare, machine)
    given = _cache_pictures(config, given, plain, machine.device, console)
    train, validation = split(config, given.train, shares)
    loss = parts.make_loss(config, classes=len(train.classes), dim=bare.embedding_dim)
    sharded = _place(bare, machine, config.training.shard)
    average = Average(bare, config.training.average) if config.training.average else None
    if config.training.compile != "none":
        compile_trunk(bare, config.training.compile)
    # not prepared by accelerate: it computes in full precision, over the rows of all processes
    loss.to(device=machine.device, dtype=next(bare.parameters()).dtype)
    optimizer = make_optimizer(config.optimizer, bare, loss, machine.device)
    proximal = Proximal(bare.parameters(), config.optimizer.proximal) if config.optimizer.proximal else None
    model = machine.prepare_model(bare) if sharded is None else sharded.model
    ranks: dict[str, int] = {"rank": machine.process_index, "world": machine.num_processes}
    sampler = parts.make_sampler(config, train.labels, **ranks, records=getattr(train, "records", None))
    across: Any = Distributed(loss)
    if isinstance(sampler, QueryPairs):
        across, loss = (QueriesToDocuments(each, sampler.documents) for each in (across, loss))
    held_on = machine.device if _holds_samples(config, machine.device) else None
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
        step=Step(config, machine, model, across, optimizer, proximal, average),
        view=View(train, augmented, seed=seed, device=held_on),
        plain=plain,
        inputs=inputs,
        shares=shares,
        sharded=sharded,
    )


def _place(model: nn.Module, machine: Any, shard: bool) -> Sharded | None:
    """Move a network to its device: in shards if wanted, otherwise on a GPU in the channels-last layout."""
    model.to(machine.device)
    if shard:
        return Sharded(model, machine)  # shards need the plain layout
    if machine.device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return None


def _holds_samples(config: Config, device: torch.device) -> bool:
    """Whether to hold the samples on the device; on a CPU they are in memory anyway."""
    return config.data.cache == "device" and device.type != "cpu"


def _cache_pictures(
    config: Config, data: DataSet, plain: Transform, device: torch.device, console: Console | None
) -> DataSet:
    """Decode the pictures once and read them from a cache, if `data.cache` asks for it."""
    spec = config.data
    cache = "memory" if spec.cache == "device" and device.type == "cpu" else spec.cache
    folder = None if spec.cache_folder is None else Path(spec.cache_folder)
    if folder is not None and spec.path is not None and lies_in(folder, Path(spec.path)):
        raise ValueError(
            f"config: data.cache_folder must lie outside the data, but {folder} is in {spec.path}; name another one, "
            "or leave it out."
        )
    return cache_data(data, plain, cache, folder=folder, console=console)
