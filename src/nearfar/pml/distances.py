"""PML's distances over our similarities: `CosineSimilarity`, `DotProductSimilarity`, `LpDistance`.

Some of PML's distances are similarities (`is_inverted`: larger = more similar), others are not. A distance here only
translates: `similarity` is ours (always larger = more similar), and `score` converts a number in PML's units, such as a
margin, to a score.
"""

from __future__ import annotations

from abc import ABC
from typing import TypeVar, Unpack

from torch import Tensor, nn

from nearfar.pml._names import Recorded, check_names
from nearfar.pml._theirs import theirs
from nearfar.similarity import Cosine, Dot, NegEuclidean, NegSquaredEuclidean, Similarity

__all__ = ["CosineSimilarity", "DotProductSimilarity", "LpDistance"]

__getattr__, __dir__ = theirs(__name__)

Number = TypeVar("Number", float, Tensor)


class Distance(nn.Module, ABC):
    """Base class of PML's distances.

    Attributes:
        similarity: our similarity.
        is_inverted: whether larger means more similar.
        normalize_embeddings: rows are divided by their norm first.
        p: which norm, always 2.
        power: exponent of the distance.
    """

    def __init__(self, similarity: Similarity, settings: Recorded, *, is_inverted: bool, power: int = 1) -> None:
        super().__init__()
        check_names(self, settings)
        self.similarity = similarity
        self.is_inverted = is_inverted
        self.normalize_embeddings = similarity.normalize
        self.p = 2
        self.power = power

    def score(self, number: Number) -> Number:
        """Convert a number in PML's units to a score, and a score to PML's units."""
        return number if self.is_inverted else -number

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> Tensor:
        """All distances [n, m] in PML's units between rows [n, d] and [m, d] (or the rows themselves)."""
        scores: Tensor = self.similarity(query_emb, query_emb if ref_emb is None else ref_emb)
        return self.score(scores)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(normalize_embeddings={self.normalize_embeddings}, p=2, power={self.power})"


class CosineSimilarity(Distance):
    """⟨x, y⟩ / (|x| |y|)."""

    def __init__(self, **settings: Unpack[Recorded]) -> None:
        super().__init__(Cosine(), settings, is_inverted=True)


class DotProductSimilarity(Distance):
    """⟨x, y⟩; as in PML, rows are divided by their norm by default."""

    def __init__(self, *, normalize_embeddings: bool = True, **settings: Unpack[Recorded]) -> None:
        super().__init__(Dot(normalize=normalize_embeddings), settings, is_inverted=True)


class LpDistance(Distance):
    """|x - y|^power for the Euclidean norm.

    Args:
        normalize_embeddings: divide rows by their norm first.
        p: 2; other norms cannot be computed by a matrix product.
        power: 1 or 2.
        settings: see `_names.Recorded`.

    >>> import torch
    >>> LpDistance(power=2)(torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]]))
    tensor([[4.]])
    """

    def __init__(
        self, *, normalize_embeddings: bool = True, p: float = 2, power: float = 1, **settings: Unpack[Recorded]
    ) -> None:
        if p != 2 or power not in (1, 2):
            raise ValueError(f"LpDistance: p must be 2 and power 1 or 2, but p={p!r} and power={power!r} came.")
        kind = NegEuclidean if power == 1 else NegSquaredEuclidean
        super().__init__(kind(normalize=normalize_embeddings), settings, is_inverted=False, power=int(power))
