"""PML's regularizers: penalties on rows or class vectors, for `embedding_regularizer=` and `weight_regularizer=`."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from nearfar._utils.checks import check_whole
from nearfar.pml._names import check_names
from nearfar.pml._records import Records
from nearfar.pml._reductions import as_ours, for_parts
from nearfar.pml._settings import MinerSettings, chosen_distance
from nearfar.pml._theirs import theirs
from nearfar.pml.distances import BaseDistance, CosineSimilarity, LpDistance
from nearfar.pml.reducers import BaseReducer, DivisorReducer, LossDict, MeanReducer

__all__ = [
    "BaseRegularizer",
    "CenterInvariantRegularizer",
    "LpRegularizer",
    "RegularFaceRegularizer",
    "SparseCentersRegularizer",
    "ZeroMeanRegularizer",
]

__getattr__, __dir__ = theirs(__name__)


class RegularizerSettings(MinerSettings, total=False):
    """Keyword arguments of every regularizer."""

    reducer: nn.Module | None


class BaseRegularizer(Records):
    """Base class of regularizers; one of your own writes `compute_loss`, as in PML.

    Args:
        settings: see `RegularizerSettings`; `get_default_distance()` and `get_default_reducer()` where none are given.

    Attributes:
        distance: PML's distance.
        reducer: PML's reducer, from the penalties of rows to a number.
    """

    def __init__(self, **settings: Unpack[RegularizerSettings]) -> None:
        check_names(self, settings, RegularizerSettings)
        super().__init__(settings.get("collect_stats"))
        owner, reducer = type(self).__name__, settings.get("reducer")
        self.distance = chosen_distance(owner, settings, self.get_default_distance())
        chosen = self.get_default_reducer() if reducer is None else as_ours(owner, reducer)
        self.reducer = for_parts(chosen, ["loss"])

    def get_default_distance(self) -> BaseDistance:
        """The distance where none is given."""
        return LpDistance()

    def get_default_reducer(self) -> BaseReducer:
        """The reducer where none is given."""
        return MeanReducer()

    def compute_loss(self, x: Tensor) -> LossDict:
        """The penalty of each row [n, d], as a reducer takes it."""
        raise TypeError(f"{type(self).__name__}: a regularizer of your own must have a method compute_loss(x).")

    def forward(self, x: Tensor) -> Tensor:
        """The penalty of rows [n, d], a scalar."""
        self.reset_stats()
        value: Tensor = self.reducer(self.compute_loss(x), x, torch.arange(len(x), device=x.device))
        return value


def _elements(losses: Tensor, divisor: int | None = None) -> LossDict:
    """Penalties [k] as a reducer takes them."""
    info = {"losses": losses, "indices": torch.arange(len(losses), device=losses.device), "reduction_type": "element"}
    return {"loss": info if divisor is None else {**info, "divisor": divisor}}


class LpRegularizer(BaseRegularizer):
    """mean over rows of |x|_p^power.

    Args:
        p: which norm.
        power: exponent of the norm; 2 with p = 2 is the L2 term of the N-pair paper.
        settings: see `RegularizerSettings`.

    >>> LpRegularizer(power=2)(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor(13.)
    """

    def __init__(self, p: float = 2, power: float = 1, **settings: Unpack[RegularizerSettings]) -> None:
        super().__init__(**settings)
        self.p = p
        self.power = power
        self.add_to_recordable_attributes(list_of_names=["p", "power"])

    def compute_loss(self, x: Tensor) -> LossDict:  # noqa: D102
        norms: Tensor = torch.linalg.vector_norm(x, ord=self.p, dim=1)
        return _elements(norms if self.power == 1 else norms**self.power)

    def extra_repr(self) -> str:  # noqa: D102
        return f"p={self.p}, power={self.power}"


class CenterInvariantRegularizer(BaseRegularizer):
    """mean over rows of  (|w|² - mean |w|²)² / 4:  class vectors of equal length.

    Args:
        settings: see `RegularizerSettings`; the distance must be `LpDistance(normalize_embeddings=False)`.
    """

    def __init__(self, **settings: Unpack[RegularizerSettings]) -> None:
        super().__init__(**settings)
        distance = self.distance
        if not isinstance(distance, LpDistance) or distance.normalize_embeddings or distance.power != 1:
            raise ValueError(
                f"CenterInvariantRegularizer: distance must be LpDistance(normalize_embeddings=False), but came as "
                f"{distance!r}; leave it out."
            )

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return LpDistance(normalize_embeddings=False)

    def compute_loss(self, x: Tensor) -> LossDict:  # noqa: D102
        squares = self.distance.get_norm(x) ** 2
        return _elements((squares - squares.mean()) ** 2 / 4)


class RegularFaceRegularizer(BaseRegularizer):
    """mean over class vectors of the cosine with the nearest other one (RegularFace).

    Args:
        settings: see `RegularizerSettings`; the distance must be one in which larger means more similar.
    """

    def __init__(self, **settings: Unpack[RegularizerSettings]) -> None:
        super().__init__(**settings)
        if not self.distance.is_inverted:
            raise ValueError(
                f"RegularFaceRegularizer: distance must be CosineSimilarity or DotProductSimilarity, but came as "
                f"{self.distance!r}."
            )

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return CosineSimilarity()

    def compute_loss(self, x: Tensor) -> LossDict:  # noqa: D102
        scores: Tensor = self.distance(x)
        with torch.no_grad():
            itself = torch.eye(len(x), dtype=torch.bool, device=x.device)
            place = scores.masked_fill(itself, -torch.inf).argmax(dim=1, keepdim=True)
        return _elements(scores.gather(1, place).flatten())


class SparseCentersRegularizer(BaseRegularizer):
    """½ mean over pairs of centers of the same class of  √(2 - 2cos):  centers that are not needed merge (SoftTriple).

    Args:
        num_classes: how many classes.
        centers_per_class: how many vectors each has, one behind the other.
        settings: see `RegularizerSettings`; the distance must be `CosineSimilarity()`; default `DivisorReducer()`.

    Attributes:
        same_class_center_sim: mean cosine of two centers of a class, with `collect_stats`.
        diff_class_center_sim: that of centers of two classes.
    """

    stats = ("same_class_center_sim", "diff_class_center_sim")

    def __init__(self, num_classes: int, centers_per_class: int, **settings: Unpack[RegularizerSettings]) -> None:
        super().__init__(**settings)
        check_whole("SparseCentersRegularizer", "num_classes", num_classes)
        check_whole("SparseCentersRegularizer", "centers_per_class", centers_per_class)
        if centers_per_class < 2:
            raise ValueError("SparseCentersRegularizer: centers_per_class must be 2 or more, but came as 1.")
        if type(self.distance) is not CosineSimilarity:
            raise ValueError(
                f"SparseCentersRegularizer: distance must be CosineSimilarity(), but came as {self.distance!r}; "
                "leave it out."
            )
        self.num_classes = num_classes
        self.centers_per_class = centers_per_class
        self.add_to_recordable_attributes(list_of_names=["num_classes", "centers_per_class"])

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return CosineSimilarity()

    def get_default_reducer(self) -> BaseReducer:  # noqa: D102
        return DivisorReducer()

    def compute_loss(self, x: Tensor) -> LossDict:  # noqa: D102
        count = self.num_classes * self.centers_per_class
        if len(x) != count:
            raise ValueError(
                f"SparseCentersRegularizer: {self.num_classes} classes x {self.centers_per_class} centers are {count} "
                f"vectors, but {len(x)} came."
            )
        scores: Tensor = self.distance(x)
        names = torch.arange(count, device=x.device) // self.centers_per_class
        same = names[:, None] == names
        pairs = scores[same.triu(diagonal=1)]
        if self.collect_stats:
            self.same_class_center_sim = float(pairs.detach().mean())
            self.diff_class_center_sim = float(scores.detach()[~same].mean())
        # centers that have merged stay: the root has no slope at 0, and PML's is 1e19 there
        gap = 2 - 2 * pairs
        apart = gap > 8 * torch.finfo(gap.dtype).eps
        losses = torch.where(apart, torch.where(apart, gap, torch.ones_like(gap)).sqrt(), torch.zeros_like(gap))
        return _elements(losses, divisor=2 * len(pairs))


class ZeroMeanRegularizer(BaseRegularizer):
    """mean over rows of |Σⱼ xⱼ|: the entries of a row add up to zero."""

    def compute_loss(self, x: Tensor) -> LossDict:  # noqa: D102
        return _elements(x.sum(dim=1).abs())
