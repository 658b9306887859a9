"""Similarities between rows by name, larger = nearer, as in `nearfar.evaluate`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nearfar.similarity import Cosine, Dot, NegEuclidean, Similarity

__all__ = ["MEASURES", "Metric", "prepared"]

Metric = Literal["cosine", "dot", "euclidean"]
MEASURES: dict[str, Similarity] = {"cosine": Cosine(), "dot": Dot(), "euclidean": NegEuclidean(normalize=False)}


def prepared(x: Tensor, similarity: Metric) -> Tensor:
    """Prepare rows for a similarity: unit length for cosine, otherwise unchanged; at least float32."""
    return MEASURES[similarity].prepared(x.to(torch.promote_types(x.dtype, torch.float32)))[0]
