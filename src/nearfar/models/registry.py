"""Networks by name: ours, and those of timm and torchvision; and the default network for a shape of inputs."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nearfar._utils.checks import check_choice
from nearfar.models.embedder import Embedder, Shape, linear
from nearfar.models.lite0 import CLASSIFIER, MEAN, SIZE, STD, Lite0, imagenet_file
from nearfar.models.small import small
from nearfar.models.text_encoders import text_trunk
from nearfar.models.timm_torchvision import Backbone, from_timm, from_torchvision
from nearfar.models.weights import Weights

__all__ = ["LARGE", "NAMES", "OWN", "build", "network_for"]

NAMES = ("small", "linear", "mlp", "lite0", "timm:NAME", "torchvision:NAME", "text:static", "text:FOLDER")
LARGE = 64
"""Pixels a side above which a picture is a photograph: too large for `small`."""


def build(
    name: str,
    *,
    embedding_dim: int | None = 128,
    inputs: Shape | None = None,
    pool: str = "avg",
    normalize: bool = True,
    pretrained: bool = True,
    weights: str | Path | None = None,
    hidden: int | None = None,
    bn_neck: bool = False,
    flip: bool = False,
    tokenizer: str | Path | None = None,
    length: int | None = None,
    texts: Iterable[str] | None = None,
    saved: Mapping[str, Any] | None = None,
) -> Embedder:
    """Build a network by name.

    Args:
        name: "small" (three convolutions for drawings), "linear" and "mlp" (on vectors), "lite0", "timm:NAME",
            "torchvision:NAME", "text:static" (the mean of a vector for each token), "text:FOLDER" (an encoder of
            sentence-transformers, transformers or model2vec) or "text:A|text:B" (one for queries, one for documents).
        embedding_dim: dimension of the embedding; None: that of the trunk's features, by a head that begins as the
            identity.
        inputs: the shape of one input, such as (1, 32, 32) for drawings or (1280,) for vectors. Networks for
            photographs have an input size of their own: `Embedder.size`.
        pool: "avg", "max", "both" or "gem" (`Embedder`), for networks whose output is a feature map.
        normalize: scale each embedding to unit length.
        pretrained: start from ImageNet weights, where the network has any.
        weights: a file in place of the pretrained weights: the state dict of the network as timm or torchvision publish
            it (.safetensors, .pth; the classifier is left out), or that of the trunk. Nothing in it is run. For
            "text:static" a .safetensors or .npz file with the token vectors [n, d].
        hidden: width of a hidden layer in the head; for "mlp" the width of its layer (default 512).
        bn_neck: put a batch norm after the head.
        flip: outside training, take the mean of the embeddings of a picture and its mirror image.
        tokenizer: for "text:static", the tokenizer.json of the token vectors; None: the one beside them.
        length: for texts, the most tokens of one; None: as the encoder says, else 256.
        texts: for "text:static" without weights, the texts whose words make the vocabulary.
        saved: descriptions of saved text encoders, in place of their folders.
    """
    kind, _, rest = name.partition(":")
    head: dict[str, Any] = {"embedding_dim": embedding_dim, "normalize": normalize, "bn_neck": bn_neck}
    if kind == "text":
        trunk = text_trunk(
            rest,
            pretrained=pretrained,
            weights=None if weights is None else Path(weights),
            tokenizer=None if tokenizer is None else Path(tokenizer),
            length=length,
            texts=texts,
            saved=saved,
        )
        return Embedder(trunk, size=(1,), pool=pool, hidden=hidden, flip=flip, **head)
    file = None if weights is None else Weights.read(Path(weights))
    pretrained = pretrained and file is None
    if rest:
        check_choice("models", "name", kind, OUTSIDE)
        trunk, size, mean, std = OUTSIDE[kind](rest, pretrained, file)
    else:
        check_choice("models", "name", name, NAMES)
        if name not in OWN:
            raise ValueError(f"models: {name!r} needs the name of a network in place of NAME, such as timm:resnet50.")
        trunk, size, mean, std = OWN[name](inputs, pretrained, hidden)
        if file is not None:
            file.load_into(trunk, CLASSIFIER)
    return Embedder(
        trunk,
        size=size if inputs is None else tuple(inputs),
        pool=pool,
        hidden=None if name == "mlp" else hidden,
        flip=flip,
        mean=mean,
        std=std,
        **head,
    )


def network_for(shape: tuple[int, ...]) -> str:
    """The default network for an input shape: a linear head for vectors, `small` for drawings, lite0 for photographs.

    >>> network_for((7,)), network_for((1, 28, 28)), network_for((3, 224, 224))
    ('linear', 'small', 'lite0')
    """
    if len(shape) == 1:
        return "linear"
    if len(shape) == 3 and max(shape[1:]) <= LARGE:
        return "small"
    if len(shape) == 3 and shape[0] == 3:
        return "lite0"
    raise ValueError(
        f"train: there is no default network for samples of shape {list(shape)}, which are neither vectors, nor "
        f"drawings of at most {LARGE} pixels a side, nor color photographs; name one, such as --model.name mlp."
    )


def _small(inputs: Shape | None, pretrained: bool, hidden: int | None) -> Backbone:
    size = inputs or (1, 32, 32)
    if len(size) != 3:
        raise ValueError(f"models: 'small' reads pictures [c, h, w], but inputs came as {tuple(size)}; try 'linear'.")
    return small(size[0]), size, (0.0,), (1.0,)


def _mlp(inputs: Shape | None, pretrained: bool, hidden: int | None) -> Backbone:
    size = _vector("mlp", inputs)
    layers = (nn.Flatten(), linear(torch.Size(size).numel(), 512 if hidden is None else hidden, "hidden"), nn.ReLU())
    return nn.Sequential(*layers), size, (0.0,), (1.0,)


def _vector(name: str, inputs: Shape | None) -> Shape:
    if not inputs:
        raise ValueError(f"models: {name!r} needs the shape of an input, but inputs is None; pass inputs=(d,).")
    return tuple(inputs)


def _lite0(inputs: Shape | None, pretrained: bool, hidden: int | None) -> Backbone:
    trunk = Lite0()
    if pretrained:
        Weights.read(imagenet_file()).load_into(trunk, CLASSIFIER)
    return trunk, SIZE, MEAN, STD


OWN: dict[str, Callable[[Shape | None, bool, int | None], Backbone]] = {
    "small": _small,
    "linear": lambda inputs, pretrained, hidden: (nn.Flatten(), _vector("linear", inputs), (0.0,), (1.0,)),
    "mlp": _mlp,
    "lite0": _lite0,
}
OUTSIDE: dict[str, Callable[[str, bool, Weights | None], Backbone]] = {
    "timm": from_timm,
    "torchvision": from_torchvision,
}
