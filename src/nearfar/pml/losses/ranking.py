"""Losses of a ranking: FastAP, smooth AP and the ranked list loss."""

from __future__ import annotations

import warnings
from typing import Unpack

import torch
from torch import Tensor

from nearfar.groups.groupings import Reduction
from nearfar.groups.ranking import Bins
from nearfar.losses import SmoothAP
from nearfar.losses.ranking import Triangle
from nearfar.losses.robust import RobustLoss
from nearfar.pml._reductions import Translation
from nearfar.pml._settings import Settings
from nearfar.pml.distances import BaseDistance, CosineSimilarity, LpDistance
from nearfar.pml.losses.base import Call, Loss, LossDict, part
from nearfar.pml.losses.listed import alone, reduced, weighed
from nearfar.sets import Mean

__all__ = ["FastAPLoss", "RankedListLoss", "SmoothAPLoss"]


class FastAPLoss(Loss):
    """mean over rows with positives of one less the average precision, from a soft histogram of distances.

    An index tuple weights rows: by how often each occurs, relative to the largest count.

    Args:
        num_bins: how many steps of the histogram.
        settings: see `Settings`; the distance must be an `LpDistance` with p = 2 of unit rows; defaults
            `LpDistance(power=2)`, `MeanReducer()`.
    """

    reads_tuple = True

    def __init__(self, num_bins: int = 10, **settings: Unpack[Settings]) -> None:
        super().__init__(settings)
        distance = self.distance
        if not isinstance(distance, LpDistance) or distance.p != 2 or not distance.normalize_embeddings:
            raise ValueError(
                f"FastAPLoss: distance must be LpDistance(power=...) of unit rows, with p=2, but came as {distance!r}."
            )
        self.num_bins = int(num_bins)
        self.num_edges = self.num_bins + 1
        self._per_row = (self._histogram("none"),)  # in a tuple, so that it is no submodule
        self._make(record=["num_bins"])

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return LpDistance(power=2)

    def _histogram(self, how: Reduction) -> RobustLoss:
        widest = float(2**self.distance.power)
        return self._take(
            RobustLoss(
                pair=Triangle(widest / self.num_bins),
                over=Mean(),
                groups=Bins(self.num_bins, -widest, 0.0),
                reduction=how,
                similarity=self.similarity,
            )
        )

    def _recipe(self, reducer: Translation) -> RobustLoss:
        return self._histogram(reducer.how)

    def _value(self, call: Call) -> Tensor:
        alone(call)
        return call.into(self.robust) if call.indices is None else reduced(self, call)

    def _elements(self, call: Call) -> LossDict:
        alone(call)
        relation = call.relation()
        rows = (relation.dense().positive > 0).any(dim=1).nonzero()[:, 0]
        return {"loss": part(weighed(call, self._per_row[0](call.embeddings, relation))[rows], rows, "element")}


class SmoothAPLoss(Loss):
    """mean over rows of one less the average precision, with sigmoids in place of the steps of a rank.

    As in PML a row is one of its own positives. Classes may have any sizes, and rows any order.

    Args:
        temperature: τ of the sigmoids.
        settings: see `Settings`; the distance must be `CosineSimilarity()`; default `MeanReducer()`.
    """

    names = ("ap_loss",)
    reads_tuple = True

    def __init__(self, temperature: float = 0.01, **settings: Unpack[Settings]) -> None:
        super().__init__(settings, fixed=True)
        self.temperature = temperature
        self._per_row = (self._take(SmoothAP(temperature=temperature, reduction="none")),)
        self._make()

    def get_default_distance(self) -> BaseDistance:  # noqa: D102
        return CosineSimilarity()

    def _recipe(self, reducer: Translation) -> RobustLoss:
        return SmoothAP(temperature=self.temperature, reduction=reducer.how)

    def _by(self, robust: RobustLoss, call: Call) -> Tensor:
        labels = call.own_labels()
        value: Tensor = robust(call.embeddings, labels, ref_emb=call.embeddings, ref_labels=labels)
        return value

    def _value(self, call: Call) -> Tensor:
        alone(call)
        # a reduction over positives would leave out single ones without loss
        plain = call.indices is None and self.robust.reduction != "nonzero"
        return self._by(self.robust, call) if plain else reduced(self, call)

    def _elements(self, call: Call) -> LossDict:
        alone(call)
        return {"ap_loss": part(weighed(call, self._by(self._per_row[0], call)), call.rows, "element")}


class RankedListLoss(Loss):
    """Ranked list loss: positives within α - m and negatives beyond α of each row, the farther off the more weight.

        (1-λ)·Σ w₊(d - (α-m)) / Σ w₊ + λ·Σ w₋(α - d) / Σ w₋,   w₊ = e^{T₊(d - (α-m))}, w₋ = e^{T₋(α - d)}

    over the pairs whose bracket is above zero. The weights are differentiated too, so that this loss has no factors
    (`robust`).

    Args:
        margin: m, between positives and negatives.
        Tn: T₋.
        imbalance: λ.
        alpha: α; 1 + m/2 where none is given.
        Tp: T₊.
        settings: see `Settings`; defaults `LpDistance()`, `MeanReducer()`.
    """

    def __init__(
        self,
        margin: float,
        Tn: float,
        imbalance: float = 0.5,
        alpha: float | None = None,
        Tp: float = 0,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__(settings)
        if not 0 <= imbalance <= 1:
            raise ValueError(f"RankedListLoss: imbalance must lie in [0, 1], but came as {imbalance!r}.")
        if max(Tp, Tn) > 5:
            warnings.warn("RankedListLoss: Tp or Tn is above 5, so that weights may overflow.", stacklevel=2)
        self.margin = margin
        self.imbalance = imbalance
        self.alpha = 1 + margin / 2 if alpha is None else alpha
        self.Tp = Tp
        self.Tn = Tn
        self._make(record=["imbalance", "alpha", "margin", "Tp", "Tn"])

    def _elements(self, call: Call) -> LossDict:
        alone(call, tuples=False)
        labels, matrix = call.own_labels(), self.distance(call.embeddings)
        same, itself = (
            labels[:, None] == labels[None, :],
            torch.eye(len(labels), dtype=torch.bool, device=labels.device),
        )
        near = self.alpha - self.margin
        far = same & ~itself & (matrix > near) & (matrix > 0)
        close = ~same & (matrix < self.alpha) & (matrix > 0)
        losses = (1 - self.imbalance) * _mean(matrix - near, far, self.Tp)
        losses = losses + self.imbalance * _mean(self.alpha - matrix, close, self.Tn)
        return {"loss": part(losses, call.rows, "element")}


def _mean(excess: Tensor, chosen: Tensor, heat: float) -> Tensor:
    """Σ w·x / Σ (w + 1e-5) of each row [n], with w = e^{heat·x} of the chosen entries and 0 elsewhere, as in PML."""
    excess = torch.where(chosen, excess, 0.0)
    weights = torch.where(chosen, torch.exp(heat * excess), 0.0)
    return (weights * excess).sum(dim=1) / (weights + 1e-5).sum(dim=1)
