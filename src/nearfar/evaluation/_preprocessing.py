"""Descriptions of preprocessing for files, and preprocessing as part of an exported graph.

An exported network takes cropped pictures as integers from 0 to 255: its graph divides by 255 and applies the mean and
the standard deviation. Resizing and cropping cannot be part of a graph that takes batches; the file describes them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nearfar.data.transforms import Photograph, Plain
from nearfar.evaluation._fingerprint import of_preprocessing, of_weights

KINDS: dict[str, type[Plain] | type[Photograph]] = {"plain": Plain, "photograph": Photograph}
OF_TRAINING = ("train", "area", "color")
IN_GRAPH = ("mean", "std")
MOST_CHANNELS = 1 << 12
LARGEST = 1 << 14  # largest side in pixels that a description may request


def describe(transform: object) -> dict[str, Any]:
    """Describe an evaluation transform in plain values: every setting that changes the network's input.

    >>> describe(Plain(mean=(0.5,)))
    {'name': 'plain', 'mean': [0.5], 'std': [1.0]}
    """
    own = getattr(transform, "describe", None)
    if own is not None:
        return dict(own())
    name = next((name for name, kind in KINDS.items() if type(transform) is kind), None)
    if name is None or getattr(transform, "train", False):
        raise ValueError(
            "export_onnx: transform must be a deterministic one of nearfar.data.transforms, "
            f"such as transforms.get('photographs', False), but came as {transform!r}."
        )
    fields = {key: value for key, value in vars(transform).items() if key not in OF_TRAINING}
    more = {"resampling": "bilinear"} if name == "photograph" else {}
    found: dict[str, Any] = json.loads(json.dumps({"name": name, **fields, **more}))
    return found


def fingerprint_of(model: nn.Module, transform: object) -> str:
    """The fingerprint of a network with its evaluation transform."""
    flip = {"flip": True} if getattr(model, "flip", False) else {}
    return f"{of_weights(model)}/{of_preprocessing({**describe(transform), **flip})}"


def beside_graph(description: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a description that is not in the graph and must be applied before it."""
    return {key: value for key, value in description.items() if key not in IN_GRAPH}


def from_text(owner: str, text: str) -> Plain | Pixels:
    """Rebuild the preprocessing of a graph from the description in its file; every value is checked."""
    try:
        transform = _build(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(
            f"{owner} describes its preprocessing in a way that cannot be read ({text[:80]!r}); export it again."
        ) from None
    return Pixels(transform) if isinstance(transform, Photograph) else transform


def from_description(given: Any) -> Plain | Photograph:
    """Rebuild a whole evaluation transform from the output of `describe`; every value is checked.

    >>> from_description(describe(Plain(mean=(0.5,))))
    Plain(mean=(0.5,), std=(1.0,))
    """
    try:
        rest = {key: value for key, value in given.items() if key not in IN_GRAPH}
        mean, std = (tuple(float(number) for number in given[name]) for name in IN_GRAPH)
        if not all(map(math.isfinite, (*mean, *std))) or 0 in std or max(len(mean), len(std)) > MOST_CHANNELS:
            raise ValueError
        return dataclasses.replace(_build(rest), mean=mean, std=std)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"unknown preprocessing: {str(given)[:80]!r}") from None


def _build(given: dict[str, Any]) -> Plain | Photograph:
    """Build a transform from its settings without mean and deviation."""
    kind = KINDS[given.pop("name")]
    given.pop("resampling", None)
    defaults = {field: value for field, value in vars(kind()).items() if field not in (*OF_TRAINING, *IN_GRAPH)}
    if any(type(value) is not type(defaults[key]) or not 0 <= value <= LARGEST for key, value in given.items()):
        raise ValueError
    transform = kind(**given)
    if isinstance(transform, Photograph) and not 0 < transform.crop <= transform.side:
        raise ValueError
    return transform


@dataclasses.dataclass(frozen=True)
class Pixels:
    """A photograph resized and cropped by a transform, as uint8 [3, h, w] in 0..255."""

    transform: Photograph

    def __call__(self, picture: Any, generator: np.random.Generator) -> Tensor:
        """One photograph."""
        return (self.transform(picture, generator) * 255).round().to(torch.uint8)


class Graph(nn.Module):
    """A network with the arithmetic of its preprocessing (scale, mean, deviation) in front.

    With a `Photograph` the graph takes uint8 pixels.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, transform: Plain | Photograph) -> None:
        super().__init__()
        self.model, self.pixels = model, isinstance(transform, Photograph)
        for name in IN_GRAPH:
            self.register_buffer(name, torch.tensor(getattr(transform, name)))

    def forward(self, x: Tensor) -> Tensor:
        """Vectors of a batch of uint8 pixels, or of values as the dataset stores them."""
        x = x.float() / 255 if self.pixels else x
        shape = (-1,) if x.ndim < 4 else (-1, 1, 1)  # numbers, or channels [c, h, w]
        vectors: Tensor = self.model((x - self.mean.view(shape)) / self.std.view(shape))
        return vectors

    def example(self, example: Tensor) -> Tensor:
        """Convert an example batch of the network to one of the graph."""
        if not self.pixels:
            return example
        return torch.randint(256, example.shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
