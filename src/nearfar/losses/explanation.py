"""`explain`: the losses, the weights p* and the dual variables behind a value."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearfar._utils.rng import set_states, states
from nearfar._utils.tensors import over
from nearfar.groups.groupings import Problems, Product
from nearfar.groups.triplets import positives
from nearfar.miners import ScoredPairs

__all__ = ["Explanation", "explain", "unexplained"]


@dataclass(frozen=True, eq=False)
class Explanation:
    """Why a loss has the value it has. Nothing in it carries a gradient.

    Attributes:
        value: F, what the loss returns.
        losses: [n, m] loss of each pair (of triplets: [n, P, m], see `positives`); 0 where there is no pair.
        weights: p* in the same shape: not negative, summing to 1 over each group (with its zero member, if it has one).
            Where positive and negative pairs form groups of their own, an anchor's weights sum to 1 for each of them.
        dual: [g] the leading dual variable of each group (TopK: threshold, KL: γ·log Σe^{l/γ}, ChiSquare: η, KLBall: γ,
            Worst: the maximum, Mean: the measure); [2, g], positive first, where the signs form groups of their own.
        active_positives: positive pairs that the gradient moves.
        active_negatives: negative pairs that the gradient moves.
        effective_pairs: (Σq)² / Σq², q = each pair's influence on F: how many pairs the weight is really spread over.
        weighted_loss: Σ q l, the weighted form; equals F where there is no penalty.
        influence: q = dF/dl, the weights times what link and reduction make of each group.
        pull: [n, m] dF/ds, negative where a pair is drawn together.
        scores: [n, m].
        positives: [n, P] the column of each positive pair, for triplets; else None.
    """

    value: Tensor
    losses: Tensor
    weights: Tensor
    dual: Tensor
    active_positives: int
    active_negatives: int
    effective_pairs: float
    weighted_loss: float
    influence: Tensor
    pull: Tensor
    scores: Tensor
    positives: Tensor | None = None

    def __repr__(self) -> str:
        value = f"{float(self.value):.6g}" if self.value.ndim == 0 else f"{len(self.value)} anchors"
        return (
            f"Explanation(value={value}, active_positives={self.active_positives}, "
            f"active_negatives={self.active_negatives}, effective_pairs={self.effective_pairs:.1f})"
        )


def explain(product: Product, pairs: ScoredPairs) -> Explanation:
    """Solve the problems of `pairs` and keep what a value throws away."""
    with torch.enable_grad():
        state = states(pairs.scores.device)
        scores = pairs.scores.detach().requires_grad_()
        pairs = replace(pairs, scores=scores)
        problems = product.groups.split(product, pairs)
        value = _joined(product, pairs, problems)
        (pull,) = torch.autograd.grad(value.sum(), scores, allow_unused=True, materialize_grads=True)
        cut = tuple(replace(problem, losses=problem.losses.detach().requires_grad_()) for problem in problems)
        leaves = tuple(problem.losses for problem in cut)
        set_states(state, pairs.scores.device)  # sets that draw must draw the same pairs again
        slopes = torch.autograd.grad(
            _joined(product, pairs, cut).sum(), leaves, allow_unused=True, materialize_grads=True
        )
    influence = [slope.reshape(problem.shape) for slope, problem in zip(slopes, problems, strict=True)]
    duals = [problem.dual() for problem in problems[:2]]
    spread = influence[0] if len(influence) == 1 else influence[0] + influence[1]
    if len(influence) == 3:  # lifted: the same negative pairs once more, seen from their columns
        spread = spread + influence[2].T
    return Explanation(
        value=value.detach(),
        losses=_losses(problems[:2]),
        weights=torch.stack([problem.weights() for problem in problems[:2]]).sum(dim=0),
        dual=torch.stack(duals) if len(duals) == 2 else duals[0],
        active_positives=int(((pull != 0) & (pairs.positive > 0)).sum()),
        active_negatives=int(((pull != 0) & (pairs.negative > 0)).sum()),
        effective_pairs=float(over(spread.abs().sum() ** 2, (spread**2).sum())),
        weighted_loss=sum(float((slope * leaf.detach()).sum()) for slope, leaf in zip(slopes, leaves, strict=True)),
        influence=spread,
        pull=pull,
        scores=scores.detach(),
        positives=positives(pairs)[1] if spread.ndim == 3 else None,
    )


def _joined(product: Product, pairs: ScoredPairs, problems: Problems) -> Tensor:
    return product.groups.join(product, pairs, problems, tuple(problem.value() for problem in problems))


def _losses(problems: Problems) -> Tensor:
    """One matrix of losses; a pair that two groups share shows the loss it has as a positive pair."""
    whole = torch.zeros(problems[0].shape, dtype=problems[0].losses.dtype, device=problems[0].losses.device)
    for problem in reversed(problems):
        there = (problem.measure > 0).reshape(problem.shape)
        whole = torch.where(there, problem.losses.detach().reshape(problem.shape), whole)
    return whole


def unexplained(value: Tensor) -> Explanation:
    """The explanation of an empty batch."""
    value = value.detach()
    none = value.new_zeros(0, 0)
    return Explanation(value, none, none, value.new_zeros(0), 0, 0, 0.0, 0.0, none, none, none)
