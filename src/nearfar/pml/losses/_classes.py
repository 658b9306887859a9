"""Losses with class vectors: the margin is only applied to the n cosines between rows and their own classes."""

from collections.abc import Callable
from typing import Any

import torch
from pytorch_metric_learning import losses
from torch import Tensor

from nearfar.pml._native import Indices, is_ours

__all__ = ["ArcFaceLoss", "CosFaceLoss"]

WIDE = (torch.float32, torch.float64)  # dtypes in which another order of summation only affects the last digits


class OwnCosines:
    """Mixin placed before a PML loss; avoids masks [n, classes]. All formulas are PML's methods."""

    # attributes of PML's class
    W: Tensor
    num_classes: int
    cast_types: Callable[..., None]
    get_cosine: Callable[..., Tensor]
    modify_cosine_of_target_classes: Callable[..., Tensor]
    scale_logits: Callable[..., Tensor]
    cross_entropy: torch.nn.CrossEntropyLoss

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Indices | None, ref_emb: Tensor, ref_labels: Tensor
    ) -> dict[str, Any]:
        """The losses of the rows for PML's reducer; arguments as in PML."""
        plain = indices_tuple is None and ref_emb is embeddings and ref_labels is labels
        plain = plain and isinstance(labels, Tensor) and labels.dtype == torch.int64 and embeddings.dtype in WIDE
        logits = self._logits(embeddings, labels[:, None]) if plain and is_ours(self) else None
        if logits is None:
            return super().compute_loss(  # type: ignore[misc,no-any-return]
                embeddings, labels, indices_tuple, ref_emb, ref_labels
            )
        rows = torch.arange(len(embeddings), device=embeddings.device)
        found = {"losses": self.cross_entropy(logits, labels), "indices": rows, "reduction_type": "element"}
        parts = {"loss": found}
        self.add_weight_regularization_to_loss_dict(parts, self.W.t())  # type: ignore[attr-defined]
        return parts

    def _logits(self, embeddings: Tensor, own: Tensor) -> Tensor | None:
        """The logits with the margin; None if PML must compute them."""
        self.cast_types(embeddings.dtype, embeddings.device)
        cosine = self.get_cosine(embeddings)
        if cosine.dtype not in WIDE or cosine.shape[1] != self.num_classes:  # under autocast, or W was replaced
            return None
        try:
            changed = self.modify_cosine_of_target_classes(cosine.gather(1, own))
        except (IndexError, RuntimeError):  # a label without a class vector: PML raises its own error
            return None
        return self.scale_logits(cosine.scatter(1, own, changed), embeddings)


class ArcFaceLoss(OwnCosines, losses.ArcFaceLoss):
    """PML's ArcFaceLoss."""


class CosFaceLoss(OwnCosines, losses.CosFaceLoss):
    """PML's CosFaceLoss."""
