"""Losses of two views of the same samples, and sums of losses: VICReg, `SelfSupervisedLoss`, `MultipleLosses`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from nearfar.pml._settings import Settings
from nearfar.pml._tuples import Indices
from nearfar.pml.losses.base import Call, Loss, LossDict, number, part

__all__ = ["BaseLossWrapper", "MultipleLosses", "SelfSupervisedLoss", "VICRegLoss"]


class VICRegLoss(Loss):
    """λ·mean (z - z')² + μ·mean [1 - std]₊ of each column + ν·Σ (off-diagonal covariance)² / d, of two views z and z'.

    Called without labels: `loss(embeddings, ref_emb=others)`. Rows are compared with the row of the same number only,
    so that this loss has no factors (`robust`).

    Args:
        invariance_lambda: λ.
        variance_mu: μ.
        covariance_v: ν.
        eps: what the variances are raised by under the root.
        settings: see `Settings`; no distance and no regularizer; default `MeanReducer()`.
    """

    names = ("invariance_loss", "variance_loss1", "variance_loss2", "covariance_loss")

    def __init__(
        self,
        invariance_lambda: float = 25,
        variance_mu: float = 25,
        covariance_v: float = 1,
        eps: float = 1e-4,
        **settings: Unpack[Settings],
    ) -> None:
        for name in ("distance", "embedding_regularizer"):
            if name in settings:
                raise ValueError(f"VICRegLoss: it has no use for {name}; leave it out.")
        super().__init__(settings)
        self.invariance_lambda = invariance_lambda
        self.variance_mu = variance_mu
        self.covariance_v = covariance_v
        self.eps = eps
        self._make()

    def _elements(self, call: Call) -> LossDict:
        first, second = call.embeddings, call.reference
        if any(x is not None for x in (call.labels, call.ref_labels, call.indices)):
            raise ValueError("VICRegLoss: it takes two views and neither labels nor index tuples; leave them out.")
        if first.shape != second.shape or len(first) < 2:
            raise ValueError(
                f"VICRegLoss: embeddings and ref_emb must have the same shape and at least two rows, but have "
                f"{list(first.shape)} and {list(second.shape)}."
            )
        far = ((first - second) ** 2).mean(dim=1)
        columns = torch.arange(first.shape[1], device=first.device)
        variances = (self.variance_mu * self._short(view) for view in (first, second))
        return {
            "invariance_loss": part(self.invariance_lambda * far, call.rows, "element"),
            "variance_loss1": part(next(variances), columns, "element"),
            "variance_loss2": part(next(variances), columns, "element"),
            "covariance_loss": number(self.covariance_v * (_correlated(first) + _correlated(second))),
        }

    def _short(self, view: Tensor) -> Tensor:
        """By how much the deviation of each column is below 1, halved (two views are averaged)."""
        return torch.relu(1 - torch.sqrt(view.var(dim=0) + self.eps)) / 2


def _correlated(view: Tensor) -> Tensor:
    """The squared covariances of different columns, over the number of columns."""
    centered = view - view.mean(dim=0)
    covariance = centered.T @ centered / (len(view) - 1)
    return (covariance - torch.diag(covariance.diagonal())).square().sum() / view.shape[1]


class BaseLossWrapper(nn.Module):
    """Base class of modules that call a loss; a subclass names the losses that it supports.

    Args:
        loss: the loss.
    """

    def __init__(self, loss: nn.Module, **more: Any) -> None:
        super().__init__(**more)
        self.check_loss_support(type(loss).__name__)

    @staticmethod
    def supported_losses() -> list[str]:
        """The names of the losses."""
        raise TypeError("BaseLossWrapper: a subclass must write supported_losses.")

    @classmethod
    def check_loss_support(cls, loss_name: str) -> None:
        """Require the name of a supported loss."""
        if loss_name not in cls.supported_losses():
            raise ValueError(
                f"{cls.__name__}: {loss_name} is not supported; take one of {', '.join(cls.supported_losses())}."
            )


class SelfSupervisedLoss(BaseLossWrapper):
    """A loss of two views of each sample, which are the positives of each other.

    Args:
        loss: a loss of `supported_losses()`.
        symmetric: both views are anchors and references; else the first is the anchor and the second the reference.

    >>> from nearfar.pml.losses import SelfSupervisedLoss, TripletMarginLoss
    >>> rows = torch.eye(3)
    >>> SelfSupervisedLoss(TripletMarginLoss())(rows, rows)
    tensor(0.)
    """

    def __init__(self, loss: nn.Module, symmetric: bool = True, **more: Any) -> None:
        super().__init__(loss=loss, **more)
        self.loss = loss
        self.symmetric = symmetric

    @staticmethod
    def supported_losses() -> list[str]:
        """The names of the losses."""
        return [
            "AngularLoss",
            "CircleLoss",
            "ContrastiveLoss",
            "GeneralizedLiftedStructureLoss",
            "IntraPairVarianceLoss",
            "LiftedStructureLoss",
            "MultiSimilarityLoss",
            "NTXentLoss",
            "SignalToNoiseRatioContrastiveLoss",
            "SupConLoss",
            "TripletMarginLoss",
            "NCALoss",
            "TupletMarginLoss",
        ]

    def forward(self, embeddings: Tensor, ref_emb: Tensor) -> Tensor:
        """The loss of two views [n, d], a differentiable scalar."""
        if embeddings.shape != ref_emb.shape:
            raise ValueError(
                f"SelfSupervisedLoss: both views must have the same shape, but have {list(embeddings.shape)} and "
                f"{list(ref_emb.shape)}."
            )
        labels = torch.arange(len(embeddings), device=embeddings.device)
        value: Tensor
        if self.symmetric:
            value = self.loss(torch.cat([embeddings, ref_emb]), torch.cat([labels, labels]))
        else:
            value = self.loss(embeddings, labels, ref_emb=ref_emb, ref_labels=labels.clone())
        return value


class MultipleLosses(nn.Module):
    """The weighted sum of several losses, each with a miner of its own if wanted.

    Args:
        losses: a list of losses, or {name: loss}.
        miners: one miner or None per loss, or {name: miner} for some of them.
        weights: one weight per loss, or {name: weight}; 1 where none are given.
    """

    def __init__(
        self,
        losses: Sequence[nn.Module] | Mapping[str, nn.Module],
        miners: Sequence[nn.Module | None] | Mapping[str, nn.Module] | None = None,
        weights: Sequence[float] | Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        self.is_dict = isinstance(losses, Mapping)
        self._names: list[Any] = list(losses) if isinstance(losses, Mapping) else list(range(len(losses)))
        self.losses: Any = self._held(losses)
        if miners is not None:
            self._check("miners", miners)
        self.miners: Any = None if miners is None else self._held(miners)
        if weights is None:
            weights = dict.fromkeys(self._names, 1.0) if self.is_dict else [1.0] * len(self._names)
        self._check("weights", weights)
        self.weights: Any = weights

    def _held(self, given: Any) -> nn.ModuleDict | nn.ModuleList:
        return nn.ModuleDict(dict(given)) if self.is_dict else nn.ModuleList(given)

    def _check(self, name: str, given: Any) -> None:
        """Require what goes with the losses: a container like theirs, with one for each (of miners, for some)."""
        if self.is_dict:
            known = isinstance(given, Mapping) and set(given) <= set(self._names)
            fits = known and (name == "miners" or len(given) == len(self._names))
        else:
            fits = isinstance(given, list | tuple) and len(given) == len(self._names)
        if not fits:
            kind = f"a dictionary of {', '.join(self._names)}" if self.is_dict else f"a list of {len(self._names)}"
            raise ValueError(f"MultipleLosses: {name} must be {kind}, like the losses, but came as {given!r}.")

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: Indices | None = None) -> Tensor:
        """The sum, a differentiable scalar; an index tuple goes to every loss, where there are no miners."""
        if self.miners and indices_tuple is not None:
            raise ValueError("MultipleLosses: it has miners of its own and takes no index tuple; leave it out.")
        total: Any = 0
        for name in self._names:
            chosen = self.get_indices_tuple(name, embeddings, labels, indices_tuple)
            total = total + self.losses[name](embeddings, labels, chosen) * self.weights[name]
        found: Tensor = total
        return found

    def get_indices_tuple(
        self, i: Any, embeddings: Tensor, labels: Tensor, indices_tuple: Indices | None
    ) -> Indices | None:
        """The tuple of the miner of one loss, or the given one."""
        if not self.miners or (self.is_dict and i not in self.miners) or self.miners[i] is None:
            return indices_tuple
        found: Indices = self.miners[i](embeddings, labels)
        return found
