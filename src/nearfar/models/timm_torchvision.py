"""Networks of timm and torchvision as trunks, without their classifiers."""

import difflib
from collections import OrderedDict
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from nearfar._utils.extras import command
from nearfar.models.embedder import Shape
from nearfar.models.weights import Weights, download

__all__ = ["Backbone", "from_timm", "from_torchvision"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Backbone = tuple[nn.Module, Shape, tuple[float, ...], tuple[float, ...]]
"""Trunk, input shape, mean, std."""
CLASSIFIERS = ("fc", "classifier", "head", "heads", "aux1", "aux2", "AuxLogits")
"""Names of torchvision's classifier layers."""
INCEPTION = {"googlenet": 224, "inception_v3": 299}
"""Networks with auxiliary classifiers, and their input size. Their published weights expect pixels from -1 to 1."""


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except (ImportError, RuntimeError) as error:  # RuntimeError: a build for another torch
        raise ImportError(
            f"models: {name}:NAME needs {name}, which does not import here ({str(error).splitlines()[0]}); "
            f"{command('vision')} in builds that fit your torch."
        ) from None


def from_timm(name: str, pretrained: bool, weights: Weights | None = None) -> Backbone:
    """Build a trunk of timm: feature maps where the network has them, else vectors by its own pooling."""
    timm = _library("timm")
    if not timm.is_model(name.split(".")[0]):
        raise _unknown("timm", name, timm.list_models(), "timm.list_models()")
    host = str(_library("huggingface_hub").constants.ENDPOINT) if pretrained else None
    with download(f"timm:{name}", host):
        trunk = timm.create_model(name, pretrained=pretrained, num_classes=0, global_pool="")
    config = timm.data.resolve_model_data_config(trunk)
    size = tuple(config["input_size"])
    with torch.no_grad():
        dims = trunk.eval()(torch.zeros(1, *size)).ndim
    if dims == 3:  # tokens [b, n, c], which the transformer pools in its own way
        trunk = timm.create_model(name, pretrained=pretrained, num_classes=0)
    if weights is not None:
        classifier = trunk.pretrained_cfg.get("classifier") or CLASSIFIERS
        weights.load_into(trunk, (classifier,) if isinstance(classifier, str) else classifier)
    return trunk, size, tuple(config["mean"]), tuple(config["std"])


def _unknown(library: str, name: str, known: list[str], where: str) -> ValueError:
    """The error for an unknown name, with the nearest known one."""
    near = difflib.get_close_matches(name.split(".")[0].lower(), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"{where} lists them."
    return ValueError(f"models: {library} has no model {name!r}; {hint}")


def from_torchvision(name: str, pretrained: bool, weights: Weights | None = None) -> Backbone:
    """Build a trunk of torchvision: feature maps for known architectures, else vectors by its own pooling."""
    models = _library("torchvision").models
    if name not in models.list_models(module=models):
        raise _unknown("torchvision", name, models.list_models(module=models), "torchvision.models.list_models()")
    address = models.get_model_weights(name).DEFAULT.url if pretrained else None
    inception = name in INCEPTION
    plain: dict[str, Any] = {"aux_logits": False, "init_weights": weights is None} if inception else {}
    if address and (Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(address).path).name).is_file():
        address = None  # it lies in torch's cache
    with download(f"torchvision:{name}", address):
        network = models.get_model(name, weights="DEFAULT") if pretrained else models.get_model(name, **plain)
    is_whole = weights is not None and bool(weights.state.keys() & network.state_dict().keys())
    if weights is not None and is_whole:
        weights.load_into(network, CLASSIFIERS)
    trunk = _cut(name, network)
    if weights is not None and not is_whole:
        weights.load_into(trunk)
    if inception:
        return trunk, (3, INCEPTION[name], INCEPTION[name]), (0.5,) * 3, (0.5,) * 3
    return trunk, (3, 224, 224), IMAGENET_MEAN, IMAGENET_STD


def _cut(name: str, network: Any) -> nn.Module:
    """The network up to its pooling; for unknown architectures, the network without its last layer."""
    if hasattr(network, "layer4") and hasattr(network, "fc"):
        return nn.Sequential(*list(network.children())[:-2])
    if name in INCEPTION:  # their children, in order, are their forward pass; the names are those of published files
        left_out = ("avgpool", "dropout", *CLASSIFIERS)
        kept = OrderedDict((part, layer) for part, layer in network.named_children() if part not in left_out)
        return nn.Sequential(kept)
    if hasattr(network, "features") and hasattr(network, "classifier"):
        last = [nn.ReLU()] if name.startswith("densenet") else []  # densenet's forward applies it after `features`
        return nn.Sequential(network.features, *last)
    for place in ("fc", "head", "heads", "classifier"):
        if hasattr(network, place):
            setattr(network, place, nn.Identity())
            trunk: nn.Module = network
            return trunk
    raise ValueError(f"models: the classifier of torchvision's {name!r} was not found; use another network, or timm's.")
