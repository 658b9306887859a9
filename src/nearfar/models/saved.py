"""Trained networks: loaded from a run folder, or saved to and loaded from one .safetensors file with a description."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.checkpoint import BEST
from nearfar._utils.checkpoint import load as load_checkpoint
from nearfar._utils.files import atomic_write, first_line
from nearfar.data import transforms
from nearfar.data._samples import Transform
from nearfar.evaluation._fingerprint import of_weights
from nearfar.evaluation._preprocessing import describe, from_description
from nearfar.models.embedder import POOLS, Embedder, freeze_norms, group_norms
from nearfar.models.registry import OWN, build, network_for
from nearfar.models.text import KEY as KEY_OF_TEXT
from nearfar.models.text import described

__all__ = ["Network", "Saved", "load", "of_checkpoint", "read"]

FORMAT = 1
KEY = "nearfar"
"""The one key in the metadata of a file: safetensors would write several in random order."""
LATER = {"flip": False}
"""Settings added after format 1, with the value that files without them imply; written only if they differ from it."""
LARGEST = 1 << 24
"""The most numbers in one input, and units in a layer, that a description may ask for."""


@dataclass(frozen=True)
class Network:
    """The arguments of `build` for a saved network, before its weights are loaded."""

    name: str
    embedding_dim: int | None
    inputs: tuple[int, ...]
    pool: str = "avg"
    normalize: bool = True
    hidden: int | None = None
    bn_neck: bool = False
    group_norms: bool = False
    freeze_norms: bool = False
    float64: bool = False
    flip: bool = False

    def make(self, *, pretrained: bool = False, weights: str | None = None, **texts: Any) -> Embedder:
        """Build the network, by default with arbitrary weights; arguments as in `build`, `texts` those for texts."""
        options = asdict(self)
        replace_norms, freeze, double = (options.pop(name) for name in ("group_norms", "freeze_norms", "float64"))
        model = build(**options, pretrained=pretrained, weights=weights, **texts)
        if replace_norms:
            group_norms(model)
        if freeze:
            freeze_norms(model.trunk)
        return model.double() if double else model

    @staticmethod
    def of_run(config: Mapping[str, Any], shape: tuple[int, ...]) -> Network:
        """The network of a run's configuration, for inputs of this shape."""
        spec = config["model"]
        name = spec["name"] or (f"{spec['query']}|{spec['document']}" if spec.get("query") else network_for(shape))
        known = {field.name: spec[field.name] for field in fields(Network) if field.name in spec}
        double = config["training"]["precision"] == "float64"
        return Network(**{**known, "name": name, "inputs": tuple(shape), "float64": double})

    @staticmethod
    def of_file(given: Any) -> Network:
        """The network that a file describes; every value is checked."""
        types = {field.name: field.type for field in fields(Network)}
        if not isinstance(given, dict) or {*given, *LATER} != set(types):
            raise ValueError("it lacks a key, or has an unknown one")
        given = {**LATER, **given}
        inputs = given["inputs"]
        widths = [given[name] for name in ("embedding_dim", "hidden") if given[name] is not None]
        if not all(type(number) is int and 1 <= number <= LARGEST for number in (*widths, *inputs)):
            raise ValueError(f"a size is not a whole number from 1 to {LARGEST:,}")
        if not 1 <= len(inputs) <= 4 or math.prod(inputs) > LARGEST:
            raise ValueError("its input is not a vector or picture of a usual size")
        flags = [given[name] for name, kind in types.items() if kind is bool]
        if not all(type(flag) is bool for flag in flags) or given["pool"] not in POOLS:
            raise ValueError("a setting has an unknown value")
        return Network(**{**given, "name": str(given["name"]), "inputs": tuple(inputs)})


@dataclass(frozen=True, eq=False)
class Saved:
    """A trained network with its transform and class names.

    Attributes:
        model: the network, in evaluation mode.
        network: how it is built.
        transform: the transform from a raw sample to its input.
        classes: names of the training classes; None if they are not known.
    """

    model: Embedder
    network: Network
    transform: Transform
    classes: tuple[str, ...] | None = None

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write weights and description to one .safetensors file, atomically; equal networks give equal bytes."""
        from safetensors.torch import save_file

        about = self._describe()
        about["digest"] = _digest(self.model, about)
        state = {name: value.detach().cpu().contiguous().clone() for name, value in self.model.state_dict().items()}
        with atomic_write(Path(path)) as temporary:
            save_file(state, temporary, {KEY: json.dumps(about)})
        return Path(path)

    def _describe(self) -> dict[str, Any]:
        network = {**asdict(self.network), "inputs": list(self.network.inputs)}
        network = {key: value for key, value in network.items() if key not in LATER or value != LATER[key]}
        classes = None if self.classes is None else list(self.classes)
        return {"format": FORMAT, "network": network, "preprocessing": describe(self.transform), "classes": classes}


def load(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Embedder:
    """Load the network of a run folder (its best weights) or of a .safetensors file, in evaluation mode.

    Args:
        path: a folder that `nearfar train` wrote, or a .safetensors file that `nearfar export` wrote.
        device: the device to load it to.

    Raises:
        FileNotFoundError: there is no such run or file.
        ValueError: it is damaged, or holds no network that can be built here.
    """
    return read(path).model.to(device)


def read(path: str | os.PathLike[str]) -> Saved:
    """Like `load`, with the transform and the class names, on the CPU; no code in the file is run."""
    path = Path(path)
    if path.is_dir():
        return _of_run(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"models: {path} must be a run folder or a .safetensors file that `nearfar export` wrote.")
    if not path.is_file():
        raise FileNotFoundError(f"models: there is no file {path}; nearfar export RUN -o NAME.safetensors writes one.")
    about = _description(path)
    try:
        saved = _from_description(about, path)
        state = _weights(path, saved.model)
        if next(saved.model.parameters()).is_meta:
            saved.model.to_empty(device="cpu")
        saved.model.load_state_dict(state)
        if about.get("digest") != _digest(saved.model, saved._describe()):
            raise ValueError("its digest does not match: it was changed or damaged")
    except ImportError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"models: {path} cannot be loaded ({first_line(error)}); export it again.") from None
    return replace(saved, model=saved.model.eval())


def _of_run(folder: Path) -> Saved:
    path = folder / "checkpoints" / "best.pt"
    if not (folder / "config.yaml").is_file():
        raise FileNotFoundError(f"models: {folder} holds no config.yaml; name the folder that `nearfar train` wrote.")
    return of_checkpoint(path, load_checkpoint(path, BEST))


def of_checkpoint(path: Path, state: Mapping[str, Any]) -> Saved:
    """The network in the state of a checkpoint of this path."""
    try:
        shape, name = tuple(state["inputs"]["shape"]), state["inputs"]["transform"]
        network = Network.of_run(state["config"], shape)
        model = network.make(saved=described(state["model"]))
        model.load_state_dict(state["model"])
        size = shape[-1] if name in transforms.CROPS else None
        share = state["inputs"].get("crop_pct")
        transform = model.transform
        if transform is None:
            transform = transforms.get(name, False, model.mean, model.std, size=size, crop_pct=share)
    except (KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(f"models: {path} does not fit its configuration ({first_line(error)}); train anew.") from None
    classes = state.get("classes")
    return Saved(model.eval(), network, transform, None if classes is None else tuple(map(str, classes)))


def _description(path: Path) -> dict[str, Any]:
    """The description in a file from an untrusted source."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(KEY)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"models: {path} is not a complete .safetensors file ({first_line(error)}); export it again."
        ) from None
    if text is None:
        raise ValueError(
            f"models: {path} holds weights without a description of their network; models.build(NAME, weights=...) "
            "takes such a file."
        )
    try:
        about = json.loads(text)
        if not isinstance(about, dict) or about["format"] != FORMAT:
            raise ValueError
    except (ValueError, KeyError, RecursionError):
        raise ValueError(
            f"models: {path} is of another format than {FORMAT}, that of this version of nearfar; export it again."
        ) from None
    return about


def _from_description(about: Mapping[str, Any], path: Path) -> Saved:
    """The described network without its weights: on the meta device, if it is one of ours."""
    network, classes = Network.of_file(about["network"]), about["classes"]
    if network.name in OWN:
        with torch.device("meta"):  # a description may ask for any size; memory is taken once the weights fit
            model = network.make()
    else:
        model = network.make(saved=_described(path))
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise ValueError("its classes are not a list of names")
    transform = model.transform or from_description(about["preprocessing"])
    return Saved(model, network, transform, None if classes is None else tuple(classes))


def _described(path: Path) -> dict[str, Any]:
    """The descriptions of the text encoders in a file."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return described({name: file.get_tensor(name) for name in file.keys() if name.endswith(KEY_OF_TEXT)})  # noqa: SIM118


def _weights(path: Path, model: Embedder) -> dict[str, Tensor]:
    """The weights of a file, read only if their names, shapes and types are those of the network."""
    from safetensors import safe_open

    wanted = {name: (list(value.shape), value.dtype) for name, value in model.state_dict().items()}
    with safe_open(path, framework="pt") as file:
        held = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  (no mapping)
        other = next((name for name in {**wanted, **held} if held.get(name) != wanted.get(name, (None,))[0]), None)
        if other is not None:
            raise ValueError(f"{other} is missing, unknown or of another shape than in {type(model).__name__}")
        state = {name: file.get_tensor(name) for name in held}
    for name, value in state.items():
        if value.dtype != wanted[name][1]:
            raise ValueError(f"{name} is of type {value.dtype}, not {wanted[name][1]}")
    return state


def _digest(model: Embedder, about: Mapping[str, Any]) -> str:
    """Digest of the weights and the description: safetensors has no checksum."""
    rest = {key: value for key, value in about.items() if key != "digest"}
    return hashlib.sha256(f"{of_weights(model)} {json.dumps(rest, sort_keys=True)}".encode()).hexdigest()
