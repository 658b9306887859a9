"""Backbones of timm and torchvision as trunks, without their classifiers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from nearfar.models.embedder import Shape

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Backbone = tuple[nn.Module, Shape, tuple[float, ...], tuple[float, ...]]
"""Trunk, shape of an input, mean, std."""


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except (ImportError, RuntimeError) as error:  # a build that does not fit torch fails with a RuntimeError
        raise ImportError(
            f"models: {name}:NAME needs {name}, which does not import here ({str(error).splitlines()[0]}); "
            "pip install 'nearfar[vision]' in builds that fit your torch."
        ) from None


def from_timm(name: str, pretrained: bool) -> Backbone:
    """A trunk of timm: maps where the network has them, else vectors by its own pooling."""
    timm = _library("timm")
    if not timm.is_model(name.split(".")[0]):
        near = timm.list_models(f"*{name.split('.')[0][:6]}*")[:3]
        hint = f"; did you mean one of {', '.join(near)}?" if near else "; timm.list_models() lists them."
        raise ValueError(f"models: timm has no model {name!r}{hint}")
    trunk = timm.create_model(name, pretrained=pretrained, num_classes=0, global_pool="")
    config = timm.data.resolve_model_data_config(trunk)
    size = tuple(config["input_size"])
    if _rank(trunk, size) == 3:  # tokens [b, n, c]: a transformer pools them in its own way
        trunk = timm.create_model(name, pretrained=pretrained, num_classes=0)
    return trunk, size, tuple(config["mean"]), tuple(config["std"])


def _rank(trunk: nn.Module, size: Shape) -> int:
    with torch.no_grad():
        return int(trunk.eval()(torch.zeros(1, *size)).ndim)


def from_torchvision(name: str, pretrained: bool) -> Backbone:
    """A trunk of torchvision: maps where the network is built in a known way, else vectors by its own pooling."""
    models = _library("torchvision").models
    if name not in models.list_models(module=models):
        raise ValueError(f"models: torchvision has no model {name!r}; torchvision.models.list_models() lists them.")
    network = models.get_model(name, weights="DEFAULT" if pretrained else None)
    return _cut(name, network), (3, 224, 224), IMAGENET_MEAN, IMAGENET_STD


def _cut(name: str, network: Any) -> nn.Module:
    """The network before its pool, or, where that is not known, with its last layer left out."""
    if hasattr(network, "layer4") and hasattr(network, "fc"):
        return nn.Sequential(*list(network.children())[:-2])
    if hasattr(network, "features") and hasattr(network, "classifier"):
        last = [nn.ReLU()] if name.startswith("densenet") else []  # densenet's forward applies it after `features`
        return nn.Sequential(network.features, *last)
    for place in ("fc", "head", "heads", "classifier"):
        if hasattr(network, place):
            setattr(network, place, nn.Identity())
            trunk: nn.Module = network
            return trunk
    raise ValueError(f"models: the classifier of torchvision's {name!r} was not found; use another network, or timm's.")
