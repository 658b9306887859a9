"""PML's distances over our similarities: `CosineSimilarity`, `DotProductSimilarity`, `LpDistance`.

PML counts some of them upwards (`is_inverted`: larger = more similar) and some downwards. Here a distance translates
and
does no more: `similarity` is ours (larger = more similar, always), and `score` turns a number in PML's units, such as a
margin, into a score.
"""

from __future__ import annotations

from abc import ABC
from typing import TypeVar, Unpack

from torch import Tensor, nn

from nearfar.pml._names import Recorded, check_names
from nearfar.similarity import Cosine, Dot, NegEuclidean, NegSquaredEuclidean, Similarity

__all__ = ["CosineSimilarity", "DotProductSimilarity", "LpDistance"]

Number = TypeVar("Number", float, Tensor)


class Distance(nn.Module, ABC):
    """What PML calls a distance.

    Attributes:
        similarity: ours.
        is_inverted: the numbers grow with likeness.
        normalize_embeddings: rows are divided by their norm first.
        p: which norm, always 2.
        power: what the distance is raised to.
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
        """The score that stands for a number in PML's units (and the number for a score)."""
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
    """⟨x, y⟩; like PML's, it divides rows by their norm unless told not to."""

    def __init__(self, *, normalize_embeddings: bool = True, **settings: Unpack[Recorded]) -> None:
        super().__init__(Dot(normalize=normalize_embeddings), settings, is_inverted=True)


class LpDistance(Distance):
    """|x - y|^power for the Euclidean norm.

    Args:
        normalize_embeddings: divide rows by their norm first.
        p: 2; other norms do not come from a matrix product.
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
