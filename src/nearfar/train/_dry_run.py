"""`dry_run`: prepare a run, measure a few steps without keeping them, draw a batch, and report what a run needs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from nearfar._utils.console import visible
from nearfar._utils.files import atomic_write, lies_in
from nearfar._utils.memory import size_of
from nearfar._utils.process_group import in_touch
from nearfar.data import DataSet, Samples
from nearfar.data._cache import default_folder
from nearfar.data._loading import Batch
from nearfar.runs import _parts as parts
from nearfar.runs._sections import AUTO, Config
from nearfar.train import _processes as processes
from nearfar.train._build import describe, open_dataset, set_data_name, set_threads
from nearfar.train._checkpoints import random_state, set_random_state
from nearfar.train._cost import describe_time, measure_peak, measure_seconds
from nearfar.train._folder import RUNS, RunFolder
from nearfar.train._length import with_usual_length
from nearfar.train._state import TrainState, load_batches, prepare
from nearfar.train._trackers import check_trackers

TILE, CAPTION, GAP, ACROSS = 96, 13, 4, 16
"""Side of a sample, height of its caption and gap, in pixels; and the largest number of columns."""
SHEET = "first-batch.png"
SEARCHED = (
    "training.steps auto: these are the usual steps; the run finds its own, in about the time of training for them"
)


@dataclass(frozen=True)
class Memory:
    """Memory of training in bytes, excluding torch itself and the data."""

    weights: int  # parameters and buffers of network and loss
    optimizer: int  # the state of the optimizer
    gradients: int  # one number per parameter
    network: int  # the measured peak of forward and backward through the network, without `gradients`
    loss: int  # the measured peak of the loss and its gradient for one batch

    @property
    def total(self) -> int:
        """The peak of a step: the network's activations are kept while the loss is computed."""
        return self.weights + self.optimizer + self.gradients + self.network + self.loss

    def __str__(self) -> str:
        return (
            f"about {size_of(self.total)}: weights {size_of(self.weights)}, optimizer {size_of(self.optimizer)}, "
            f"gradients {size_of(self.gradients)}, activations {size_of(self.network)}, the loss {size_of(self.loss)}; "
            "besides torch and the data"
        )


@dataclass(frozen=True, eq=False)
class DryRun:
    """The result of `dry_run`.

    Attributes:
        lines: the report as lines of text; empty on every rank but the first.
        memory: the memory of a step.
        picture: the file with the first batch, if samples are pictures.
    """

    lines: tuple[str, ...]
    memory: Memory
    picture: Path | None


@in_touch("train")
def dry_run(config: Config, folder: Path | None = None, *, data: DataSet | None = None) -> DryRun:
    """Do what `fit` does before its first step, and measure the memory and the time of a step.

    No run folder is created, no decoded pictures are stored, and random generators are restored. The picture of the
    first batch is written beside the path of the run folder, or to the user's cache folder if that path lies in the
    folder of the data.

    Args:
        config: the configuration.
        folder: the run folder that `fit` would use.
        data: as in `fit`.
    """
    parts.check(config)
    check_trackers(config.training.trackers)
    config = config if data is not None else set_data_name(config)
    search = config.training.steps == AUTO
    if search:
        data = data or open_dataset(config.data)
        config = with_usual_length(config, data)
    set_threads(config)
    machine = processes.begin(config.training.precision)
    processes.run_on_first_rank(machine, RunFolder(folder).check)
    before = random_state()
    try:
        uncached = replace(config, data=replace(config.data, cache="none"))
        found = _measure(config, prepare(uncached, machine, data), folder)
        return replace(found, lines=(*found.lines, SEARCHED)) if search and found.lines else found
    finally:
        set_random_state(before)


def _measure(config: Config, state: TrainState, folder: Path | None) -> DryRun:
    machine = state.machine
    _, (x, labels, indices) = next(load_batches(state))
    batch = (state.view.render(x, indices, machine.device), labels, indices)
    memory = _measure_memory(state, batch)
    cached = config.data.cache != "none" and is_picture(state.inputs.shape)
    seconds, picture = measure_seconds(state, cached=cached), None
    if not machine.is_main_process:
        return DryRun((), memory, None)
    if is_picture(state.inputs.shape):
        picture = _draw_batch(state, batch, _picture_path(config, folder))
    time = describe_time(config.training.length, seconds) + " and decoding" * cached
    return DryRun((*_lines(state, batch, memory), f"time on this machine: {time}"), memory, picture)


def _picture_path(config: Config, folder: Path | None) -> Path:
    """The path of the picture; not in the folder of the data, where it would count as a sample."""
    place = RUNS / SHEET if folder is None else folder.with_name(f"{folder.name}-{SHEET}")
    home = config.data.path
    return place if home is None or not lies_in(place, Path(home)) else default_folder() / SHEET


def _lines(state: TrainState, batch: Batch, memory: Memory) -> list[str]:
    """The report on data, network, batch, steps and memory."""
    config, world = state.config, state.machine.num_processes
    rows, steps = len(batch[1]) * world, config.training.length
    classes = len(set(batch[1].tolist()))
    own = sum(p.numel() for p in state.loss.parameters())
    sides = {
        "train": state.train,
        "validation": state.validation,
        "test": state.data.test,
        "gallery": state.data.gallery,
    }
    return [
        processes.describe(state.machine),
        *([state.data.about] if state.data.about else []),
        *(f"{name}: {_describe_samples(samples)}" for name, samples in sides.items() if samples is not None),
        *describe(config, state.shares, state.inputs, state.bare_model, state.machine.device).splitlines(),
        f"loss {config.loss.name}: {own:,} parameters of its own",
        f"batch: {classes} classes x {len(batch[1]) / classes:g} samples"
        + (f" in each of {world} processes" if world > 1 else "")
        + f", {list(batch[0].shape)} of {str(batch[0].dtype).removeprefix('torch.')}",
        f"steps: {steps:,} of {rows:,} samples, {steps * rows / len(state.train):.1f} epochs of {len(state.train):,}",
        f"memory{' of each process' if world > 1 else ''}: {memory}",
    ]


def _describe_samples(samples: Samples) -> str:
    """Report the number of samples and classes, and the sizes of the classes."""
    sizes = np.bincount(samples.labels)
    few, many = int(sizes.min()), int(sizes.max())
    each = f"{few}" if few == many else f"{few} to {many} (median {np.median(sizes):g})"
    first = samples[0]
    what = "texts"
    if not isinstance(first, str):
        tensor = isinstance(first, Tensor)
        what = f"samples {list(first.shape) if tensor else f'{first.width} x {first.height} pixels (the first)'}"
    return f"{len(samples):,} {what} of {len(sizes):,} classes, {each} in each"


def _measure_memory(state: TrainState, batch: Batch) -> Memory:
    """Measure forward and backward of network and loss separately, in chunks as in training."""
    device, chunk = state.machine.device, state.config.training.chunk
    x, labels = batch[0].to(device), batch[1].to(device)
    state.model.train()
    state.step.backward(x, state.target(labels), state.ids(batch[2]))  # raises the errors of training
    state.step.optimizer.zero_grad()
    with torch.no_grad():
        embeddings = torch.cat([state.model(part) for part in torch.split(x, chunk or len(x))]).float()

    def through_loss() -> Tensor:
        rows = embeddings.clone().requires_grad_()
        state.step.loss(rows, state.target(labels), ids=state.ids(batch[2])).backward()
        return rows

    def through_network() -> None:
        out = state.model(x[: chunk or len(x)])
        out.backward(torch.ones_like(out))

    _, loss = measure_peak(through_loss, device)
    _, network = measure_peak(through_network, device)
    spec, learned = state.config.optimizer, [*state.bare_model.parameters(), *state.loss.parameters()]
    moments = 2 if spec.name != "sgd" else int(spec.momentum > 0)
    gradients = sum(p.numel() * p.element_size() for p in learned if p.requires_grad)
    state.step.optimizer.zero_grad()
    return Memory(
        weights=_bytes(state.bare_model) + _bytes(state.loss),
        optimizer=(moments + (spec.proximal > 0)) * gradients,
        gradients=gradients,
        network=max(0, network - sum(p.numel() * p.element_size() for p in state.bare_model.parameters())),
        loss=loss,
    )


def _bytes(module: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def _draw_batch(state: TrainState, batch: Batch, path: Path) -> Path:
    model: Any = state.bare_model
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [state.train.classes[label] for label in batch[1].tolist()]
    each = max(1, len(names) // len(set(names)))
    columns = max(each, ACROSS - ACROSS % each) if each <= ACROSS else ACROSS
    return contact_sheet(path, batch[0], names, mean=model.mean, std=model.std, columns=columns)


def is_picture(shape: Sequence[int]) -> bool:
    """Whether samples of a shape are pictures, gray or in color.

    >>> is_picture((3, 32, 32)), is_picture((1, 8, 8)), is_picture((128,))
    (True, True, False)
    """
    return len(shape) == 3 and shape[0] in (1, 3)


def contact_sheet(
    path: Path, x: Tensor, names: Sequence[str], *, mean: Sequence[float], std: Sequence[float], columns: int = ACROSS
) -> Path:
    """Write samples [n, c, h, w] to one PNG file, each with its name, which is cut to the width of the sample.

    `mean` and `std` of each channel undo the standardization.
    """
    shape = (-1, 1, 1)
    plain = x.detach().float().cpu() * torch.tensor(std).view(shape) + torch.tensor(mean).view(shape)
    pixels = (plain.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    wide, tall = TILE + GAP, TILE + CAPTION + GAP
    columns = min(columns, len(pixels))
    sheet = Image.new("RGB", (columns * wide + GAP, -(-len(pixels) // columns) * tall + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for place, (picture, name) in enumerate(zip(pixels, names, strict=True)):
        left, top = GAP + place % columns * wide, GAP + place // columns * tall
        sheet.paste(_tile(Image.fromarray(picture.squeeze())), (left, top))
        draw.text((left, top + TILE + 1), _cut(draw, visible(name, "latin-1"), font), fill="black", font=font)
    with atomic_write(path) as temporary:
        sheet.save(temporary, format="PNG")
    return path


def _tile(picture: Image.Image) -> Image.Image:
    """Resize a picture to a square of `TILE` pixels; small drawings are enlarged without smoothing."""
    how = Image.Resampling.NEAREST if max(picture.size) < TILE else Image.Resampling.BILINEAR
    share = TILE / max(picture.size)
    size = (max(1, round(picture.width * share)), max(1, round(picture.height * share)))
    tile = Image.new("RGB", (TILE, TILE), "white")
    tile.paste(picture.convert("RGB").resize(size, how))
    return tile


def _cut(draw: ImageDraw.ImageDraw, name: str, font: object) -> str:
    """The beginning of a name that fits below a sample."""
    while name and draw.textlength(name, font=font) > TILE:  # type: ignore[arg-type]
        name = name[:-1]
    return name
