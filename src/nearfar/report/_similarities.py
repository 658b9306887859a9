"""The similarities of `nearfar.evaluate` by name; a larger score means nearer."""

from typing import Literal

import torch
from torch import Tensor

from nearfar.similarity import Cosine, Dot, NegEuclidean, Similarity

Metric = Literal["cosine", "dot", "euclidean"]
SIMILARITIES: dict[str, Similarity] = {"cosine": Cosine(), "dot": Dot(), "euclidean": NegEuclidean(normalize=False)}


def prepare(x: Tensor, similarity: Metric) -> Tensor:
    """Prepare rows for a similarity: unit length for cosine, otherwise unchanged; at least float32."""
    return SIMILARITIES[similarity].prepared(x.to(torch.promote_types(x.dtype, torch.float32)))[0]
