"""PML's distances over our similarities.

Some of PML's distances are similarities (`is_inverted`: larger = more similar), others are not. `similarity` is ours
(always larger = more similar), and `score` converts a number in PML's units, such as a margin, to a score. The common
ones are similarities that every engine knows; all others, and those that a user writes, are computed as a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from nearfar.pml._names import Recorded, check_names
from nearfar.pml._records import Records
from nearfar.pml._theirs import PACKAGE, theirs
from nearfar.similarity import Cosine, Dot, NegEuclidean, NegSquaredEuclidean, Similarity

__all__ = [
    "BaseDistance",
    "BatchedDistance",
    "CosineSimilarity",
    "DotProductSimilarity",
    "LpDistance",
    "SNRDistance",
]

__getattr__, __dir__ = theirs(__name__)

Number = TypeVar("Number", float, Tensor)


class Norms(Recorded, total=False):
    """Keyword arguments of `CosineSimilarity`."""

    p: float
    power: float


class Rows(Norms, total=False):
    """Keyword arguments of the other distances."""

    normalize_embeddings: bool


class Measures(Protocol):
    """What a loss or a miner asks of a distance, whoever wrote it."""

    is_inverted: bool

    def __call__(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> Tensor: ...


class BaseDistance(Records):
    """Base class of distances; a subclass writes `compute_mat(query_emb, ref_emb)`, and `pairwise_distance`.

    Args:
        normalize_embeddings: divide rows by their norm first.
        p: which norm.
        power: exponent of what `compute_mat` returns.
        is_inverted: whether larger means more similar.
        settings: see `_names.Recorded`.
    """

    stats = ("initial_avg_query_norm", "initial_avg_ref_norm", "final_avg_query_norm", "final_avg_ref_norm")

    def __init__(
        self,
        normalize_embeddings: bool = True,
        p: float = 2,
        power: float = 1,
        is_inverted: bool = False,
        **settings: Unpack[Recorded],
    ) -> None:
        check_names(self, settings, Rows)
        super().__init__(settings.get("collect_stats"))
        self.normalize_embeddings = normalize_embeddings
        self.p = p
        self.power = power
        self.is_inverted = is_inverted
        self.add_to_recordable_attributes(list_of_names=["p", "power"])
        self._kept = (self._known(),)  # in a tuple, so that it is no submodule

    @property
    def similarity(self) -> Similarity:
        """Our similarity with the same scores."""
        return self._kept[0] or Matrix(self)

    def _known(self) -> Similarity | None:
        """The similarity that every engine knows, where this is one."""
        return None

    def score(self, number: Number) -> Number:
        """Convert a number in PML's units to a score, and a score to PML's units."""
        return number if self.is_inverted else -number

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> Tensor:
        """All distances [n, m] in PML's units between rows [n, d] and [m, d] (or the rows themselves)."""
        self.reset_stats()
        for rows in (query_emb, ref_emb):
            if rows is not None and rows.ndim != 2:
                raise ValueError(f"{type(self).__name__}: embeddings must be [n, d], but are {list(rows.shape)}.")
        known = None if self.collect_stats else self._kept[0]
        if known is not None:
            scores: Tensor = known(query_emb, query_emb if ref_emb is None else ref_emb)
            return self.score(scores)
        query = self.maybe_normalize(query_emb)
        ref = query if ref_emb is None else self.maybe_normalize(ref_emb)
        if self.collect_stats:
            self._note(query_emb, query_emb if ref_emb is None else ref_emb, query, ref)
        matrix = self.compute_mat(query, ref)
        return matrix if self.power == 1 else matrix**self.power

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """All distances [n, m] between rows that are normalized already, before the exponent."""
        raise TypeError(f"{type(self).__name__} does not write compute_mat.")

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Distances [n] between the i-th rows of both, as they are and without the exponent."""
        raise TypeError(f"{type(self).__name__} does not write pairwise_distance.")

    def smallest_dist(self, *args: Any, **kwargs: Any) -> Any:
        """What `torch.min` returns, or `torch.max` where larger means more similar."""
        return (torch.max if self.is_inverted else torch.min)(*args, **kwargs)

    def largest_dist(self, *args: Any, **kwargs: Any) -> Any:
        """What `torch.max` returns, or `torch.min` where larger means more similar."""
        return (torch.min if self.is_inverted else torch.max)(*args, **kwargs)

    def margin(self, x: Any, y: Any) -> Any:
        """By how much x is farther than y."""
        return y - x if self.is_inverted else x - y

    def normalize(self, embeddings: Tensor, dim: int = 1, **kwargs: Any) -> Tensor:
        """Divide rows by their norm."""
        return functional.normalize(embeddings, p=self.p, dim=dim, **kwargs)

    def maybe_normalize(self, embeddings: Tensor, dim: int = 1, **kwargs: Any) -> Tensor:
        """Divide rows by their norm, if `normalize_embeddings` says so."""
        return self.normalize(embeddings, dim, **kwargs) if self.normalize_embeddings else embeddings

    def get_norm(self, embeddings: Tensor, dim: int = 1, **kwargs: Any) -> Tensor:
        """The norms of rows [n]."""
        norms: Tensor = torch.linalg.vector_norm(embeddings, ord=self.p, dim=dim, **kwargs)
        return norms

    @torch.no_grad()
    def _note(self, *rows: Tensor) -> None:
        for name, each in zip(BaseDistance.stats, rows, strict=True):
            setattr(self, name, self.get_norm(each).mean().item())

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(normalize_embeddings={self.normalize_embeddings}, p={self.p}, power={self.power})"
        )


class Matrix(Similarity):
    """The scores of a distance that is known only by what it returns for two sets of rows.

    The distance is no submodule: it belongs to the loss or the miner, and its parameters are saved there.
    """

    def __init__(self, of: Measures) -> None:
        super().__init__(normalize=False)
        self._of = (of,)

    def finish(self, dot: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        raise ValueError(f"{type(self._of[0]).__name__}: it is not made of products.")

    def distance(self, scores: Tensor) -> Tensor:
        raise ValueError(f"{type(self._of[0]).__name__}: its numbers say no Euclidean distance; use LpDistance().")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        (of,) = self._of
        matrix = of(x) if y is x else of(x, y)
        return matrix if of.is_inverted else -matrix


class DotProductSimilarity(BaseDistance):
    """⟨x, y⟩; as in PML, rows are divided by their norm by default."""

    def __init__(self, **settings: Unpack[Rows]) -> None:
        super().__init__(is_inverted=True, **settings)

    def _known(self) -> Similarity | None:
        standard = type(self) in (DotProductSimilarity, CosineSimilarity) and self.p == 2 and self.power == 1
        if not standard:
            return None
        return Cosine() if type(self) is CosineSimilarity else Dot(normalize=self.normalize_embeddings)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:  # noqa: D102
        return query_emb @ ref_emb.transpose(-1, -2)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:  # noqa: D102
        return (query_emb * ref_emb).sum(dim=1)


class CosineSimilarity(DotProductSimilarity):
    """⟨x, y⟩ / (|x| |y|)."""

    def __init__(self, **settings: Unpack[Norms]) -> None:
        super().__init__(normalize_embeddings=True, **settings)


class LpDistance(BaseDistance):
    """|x - y|_p^power.

    With p = 2 and power 1 or 2 every engine computes it by matrix products; other norms are computed as a matrix
    [n, m].

    Args:
        settings: `normalize_embeddings=True` (by the same norm), `p=2`, `power=1`, and see `_names.Recorded`.

    >>> import torch
    >>> LpDistance(power=2)(torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]]))
    tensor([[4.]])
    """

    def __init__(self, **settings: Unpack[Rows]) -> None:
        super().__init__(**settings)

    def _known(self) -> Similarity | None:
        if type(self) is not LpDistance or self.p != 2 or self.power not in (1, 2):
            return None
        kind = NegEuclidean if self.power == 1 else NegSquaredEuclidean
        return kind(normalize=self.normalize_embeddings)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:  # noqa: D102
        if query_emb.dtype not in (torch.float32, torch.float64):  # torch.cdist knows these two
            return torch.cdist(query_emb.float(), ref_emb.float(), p=self.p).to(query_emb.dtype)
        return torch.cdist(query_emb, ref_emb, p=self.p)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:  # noqa: D102
        return functional.pairwise_distance(query_emb, ref_emb, p=self.p)


class SNRDistance(BaseDistance):
    """Signal-to-noise ratio: var(x - y) / var(x), where the variance is over the entries of a row.

    Args:
        settings: `normalize_embeddings=True`, `p=2` (its norm), `power=1`, and see `_names.Recorded`.
    """

    def __init__(self, **settings: Unpack[Rows]) -> None:
        super().__init__(**settings)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:  # noqa: D102
        x, y = (rows - rows.mean(dim=1, keepdim=True) for rows in (query_emb, ref_emb))
        # the variance of a difference is the squared distance of centered rows over d - 1
        noise = -NegSquaredEuclidean(normalize=False)(x, y).clamp_max(0.0) / (x.shape[1] - 1)
        matrix: Tensor = noise / query_emb.var(dim=1, keepdim=True)
        return matrix

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:  # noqa: D102
        return (query_emb - ref_emb).var(dim=1) / query_emb.var(dim=1)


class BatchedDistance(nn.Module):
    """Compute a distance block by block, and hand each block to a function; nothing is returned.

    Args:
        distance: a distance.
        iter_fn: called as `iter_fn(matrix, start, end)` with the distances [b, m] of the rows start..end.
        batch_size: how many rows a block has.
    """

    def __init__(
        self,
        distance: nn.Module,
        iter_fn: Callable[[Tensor, int, int], object] | None = None,
        batch_size: int = 32,
    ) -> None:
        super().__init__()
        self.distance = distance
        self.iter_fn = iter_fn
        self.batch_size = batch_size

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> None:
        """Go through the rows [n, d] against the reference [m, d] (or the rows themselves)."""
        if self.iter_fn is None:
            raise ValueError("BatchedDistance: iter_fn is missing; set a function of (matrix, start, end).")
        ref = query_emb if ref_emb is None else ref_emb
        for start in range(0, len(query_emb), self.batch_size):
            self.iter_fn(self.distance(query_emb[start : start + self.batch_size], ref), start, start + self.batch_size)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "distance":
                raise
            return getattr(self.distance, name)


def as_ours(owner: str, distance: Any) -> Any:
    """A distance of PML's as the same one of ours; any other that is called like one stays as it is."""
    kind = type(distance)
    if isinstance(distance, BaseDistance):
        return distance
    known = ("CosineSimilarity", "DotProductSimilarity", "LpDistance", "SNRDistance")
    if kind.__module__.startswith(f"{PACKAGE}.distances") and kind.__name__ in known:
        more = {"p": distance.p, "power": distance.power, "collect_stats": distance.collect_stats}
        if kind.__name__ != "CosineSimilarity":
            more["normalize_embeddings"] = distance.normalize_embeddings
        return globals()[kind.__name__](**more)
    if isinstance(distance, type) or not callable(distance) or not hasattr(distance, "is_inverted"):
        raise TypeError(
            f"{owner}: distance must be one of nearfar.pml.distances or of their kind (called with rows, with "
            f"`is_inverted`), but came as {distance!r}."
        )
    return distance


def similarity_of(distance: Any) -> Similarity:
    """Our similarity with the scores of a distance, whoever wrote it."""
    return distance.similarity if isinstance(distance, BaseDistance) else Matrix(distance)


def score_of(distance: Measures, number: Number) -> Number:
    """Convert a number in the units of a distance to a score, larger = more similar."""
    return number if distance.is_inverted else -number
