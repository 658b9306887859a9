"""Photographs and texts as queries: their vectors, from the network that an index holds or that the user names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nearfar.cli.commands.inputs import Assumed, Transformed, are_texts, read_samples
from nearfar.cli.commands.networks import Model, load_model
from nearfar.data._folders import SUFFIXES
from nearfar.data._texts import corpus
from nearfar.data._tokens import Tokens, TwoTokens
from nearfar.evaluation import DiskIndex, Vectors, embed
from nearfar.evaluation._fingerprint import check_same_network
from nearfar.evaluation._preprocessing import Pixels, describe
from nearfar.evaluation._vectors import RUN_FILE
from nearfar.evaluation.vectors_folder import MANIFEST

if TYPE_CHECKING:
    from nearfar.data._samples import Transform
    from nearfar.evaluation import Index


@dataclass(frozen=True, eq=False)
class QueryNetwork:
    """A network with its preprocessing."""

    network: Model
    transform: Transform  # from a picture or a text to the network's input
    mark: str | None  # the fingerprint of its vectors, or None

    @property
    def takes_texts(self) -> bool:
        """Whether queries are texts, not photographs."""
        return isinstance(self.transform, Tokens | TwoTokens)

    def vector(self, query: Any) -> Tensor:
        """The vector [d] of a PIL image, or of a text."""
        batch = self.transform(query, np.random.default_rng(0))[None]
        with torch.no_grad():
            out: Any = self.network.run(batch)
        return torch.as_tensor(out).detach().float().cpu()[0]

    def vectors(self, source: Path) -> Vectors:
        """The vectors of a photograph, of all photographs in a folder or of a file of texts, with their names."""
        pictures: Any
        names: tuple[str, ...] | None
        if are_texts(source):
            pictures = corpus(source).texts
            names = tuple(pictures.names)
        elif source.is_dir():
            assumed = self.transform if isinstance(self.transform, Assumed) else Assumed(1)
            samples = read_samples(str(source), assumed=assumed, thumbnails=0)
            pictures, names = samples.raw, samples.name
        else:
            from nearfar.data._pictures import Pictures

            pictures, names = Pictures([source], [0], [source.name], ["photograph"]), (source.name,)
        made = embed(self.network.run, Transformed(pictures, self.transform), batch_size=32)
        return Vectors(made.x if isinstance(made, Vectors) else made, name=names, fingerprint=self.mark)


def need_network(source: Path) -> bool:
    """Whether queries are photographs or texts rather than vectors."""
    if are_texts(source):
        return True
    if source.is_dir():
        return not any((source / name).is_file() for name in ("config.yaml", RUN_FILE, MANIFEST))
    return source.suffix.lower() in SUFFIXES


def network_of(made: Index | DiskIndex, name: Path, model: Path | None, *, trust_model: bool) -> QueryNetwork | None:
    """The network of an index: `model` if it is given, else the one that the index holds; None if it holds none.

    A network that did not make the vectors is refused; `name` names the index in the message.
    """
    path = model or (made.network if isinstance(made, DiskIndex) else None)
    if path is None:
        return None
    network = load_model(path, trust_model=trust_model)
    transform = transform_of(network, made.preprocessing if isinstance(made, DiskIndex) else None)
    mark = network.mark(transform if isinstance(transform, Assumed) else None)
    check_same_network("search", (str(name), made.fingerprint), (str(path), mark))
    return QueryNetwork(network, transform, mark)


def transform_of(network: Model, noted: dict[str, Any] | None) -> Any:
    """The transform of a network: its own, else the one stored in the index, else the default."""
    if network.transform is not None:
        return network.transform
    given = noted or {}
    if given.get("name") != "assumed":
        return network.assumed(None, imagenet=False)
    size, imagenet, pixels = given.get("size"), given.get("imagenet"), given.get("pixels")
    if type(size) is not int or not 0 < size <= 1 << 14 or type(imagenet) is not bool or type(pixels) is not bool:
        raise ValueError(f"the index holds an unknown preprocessing: {str(given)[:80]!r}; build it again.")
    return Assumed(size, imagenet, pixels)


def describe_transform(transform: Callable[..., Any]) -> dict[str, Any]:
    """A transform in plain values, to be stored in an index."""
    if isinstance(transform, Assumed):
        return {"name": "assumed", **asdict(transform)}
    return describe(transform.transform if isinstance(transform, Pixels) else transform)
