"""`Composed`: losses that are a product after something was made first: proxies, a rectangle, a regulariser."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nearfar._checks import check_embeddings
from nearfar.explanation import Explanation
from nearfar.relations import Relation
from nearfar.robust import Labels, RobustLoss


@dataclass(frozen=True, eq=False)
class Inner:
    """What the product inside is called with."""

    embeddings: Tensor
    relation: Relation
    ref_emb: Tensor | None


class Composed(nn.Module, ABC):
    """A `RobustLoss` whose rows, columns or relation are made from the batch first."""

    def __init__(self, robust: RobustLoss) -> None:
        super().__init__()
        self.robust = robust
        robust.owner = type(self).__name__

    @property
    def exact_gradient(self) -> bool:
        """Whether the gradient is that of the value."""
        return self.robust.exact_gradient

    @abstractmethod
    def _inner(
        self,
        embeddings: Tensor,
        labels: Labels,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
        ids: Tensor | None,
        ref_ids: Tensor | None,
    ) -> Inner: ...

    def _extra(self, embeddings: Tensor) -> Tensor | None:
        """A term beside the product, or None."""
        return None

    def _call(self, embeddings: Tensor, labels: Labels, indices: object, *reference: Tensor | None) -> Inner:
        owner = type(self).__name__
        if indices is not None:
            raise ValueError(f"{owner}: this loss chooses its own pairs and takes no index tuple; leave it out.")
        return self._inner(embeddings, labels, *reference)

    def forward(
        self,
        embeddings: Tensor,
        labels: Labels = None,
        indices: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
    ) -> Tensor:
        """The loss, a differentiable scalar. Arguments as for `RobustLoss`; `indices` must be left out."""
        check_embeddings(type(self).__name__, "embeddings", embeddings)
        with torch.autocast(device_type=embeddings.device.type, enabled=False):
            inner = self._call(embeddings, labels, indices, ref_emb, ref_labels, ids, ref_ids)
            value: Tensor = self.robust(inner.embeddings, inner.relation, ref_emb=inner.ref_emb)
            extra = self._extra(embeddings)
            return value if extra is None else value + extra

    def explain(
        self,
        embeddings: Tensor,
        labels: Labels = None,
        indices: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
    ) -> Explanation:
        """The value and what produced it, in the rows and columns of the product inside."""
        check_embeddings(type(self).__name__, "embeddings", embeddings)
        inner = self._call(embeddings, labels, indices, ref_emb, ref_labels, ids, ref_ids)
        found = self.robust.explain(inner.embeddings, inner.relation, ref_emb=inner.ref_emb)
        extra = self._extra(embeddings)
        return found if extra is None else replace(found, value=found.value + extra.detach())
