"""PML's `LpRegularizer`: a penalty on the norm of rows, for `embedding_regularizer=` and `weight_regularizer=`."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from nearfar.pml._names import Recorded, check_names
from nearfar.pml._theirs import theirs

__all__ = ["LpRegularizer"]

__getattr__, __dir__ = theirs(__name__)


class LpRegularizer(nn.Module):
    """mean over rows of |x|_p^power.

    Args:
        p: which norm.
        power: exponent of the norm; 2 with p = 2 is the L2 term of the N-pair paper.
        settings: see `_names.Recorded`.

    >>> LpRegularizer(power=2)(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor(13.)
    """

    def __init__(self, p: float = 2, power: float = 1, **settings: Unpack[Recorded]) -> None:
        super().__init__()
        check_names(self, settings)
        self.p = p
        self.power = power

    def forward(self, embeddings: Tensor) -> Tensor:
        """The penalty of rows [n, d], a scalar."""
        norms: Tensor = torch.linalg.vector_norm(embeddings, ord=self.p, dim=1)
        return (norms if self.power == 1 else norms**self.power).mean()

    def extra_repr(self) -> str:  # noqa: D102
        return f"p={self.p}, power={self.power}"
