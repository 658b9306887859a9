"""`explain`: the pair losses, the weights p* and the dual variables behind the value of a loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.html import details, table
from nearfar._utils.rng import set_states, states
from nearfar._utils.tensors import over
from nearfar.groups._groupings import Problems, Product
from nearfar.groups._ranking import Bins
from nearfar.groups._triplets import positives
from nearfar.miners import ScoredPairs

__all__ = ["Explanation", "explain", "sum_explanations", "unexplained"]


@dataclass(frozen=True, eq=False)
class Explanation:
    """The pair losses and weights that make up the value of a loss; no tensor in it carries a gradient.

    Attributes:
        value: F, what the loss returns.
        losses: [n, m] loss of each pair (of triplets and ranks: [n, P, m], see `positives`; of a histogram
            [n, bins, m]); 0 where there is no pair.
        weights: p* in the same shape: not negative, summing to 1 over each group (with its zero member, if it has one).
            If positive and negative pairs form separate groups, an anchor's weights sum to 1 for each of them.
        dual: [g] the leading dual variable of each group (TopK: threshold, KL: γ·log Σe^{l/γ}, ChiSquare: η, KLBall: γ,
            Worst: the maximum, Mean: the measure); [2, g], positive first, if the signs form separate groups.
        active_positives: positive pairs that the gradient moves.
        active_negatives: negative pairs that the gradient moves.
        effective_pairs: (Σq)² / Σq², q = each pair's influence on F: how many pairs the weight is really spread over.
        weighted_loss: Σ q l, the weighted form; equals F if there is no penalty.
        influence: q = dF/dl: the weights, with the effect of link and reduction on each group.
        pull: [n, m] dF/ds, negative where a pair is drawn together.
        scores: [n, m].
        signs: [n, m] 1 for a positive pair, -1 for a negative pair, 0 where there is none; before any mining.
        positives: [n, P] the column of each positive pair, for triplets and ranks; else None.
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
    signs: Tensor
    positives: Tensor | None = None

    def confident_pairs(self, confidence: float = 0.95) -> float:
        """The effective pairs a row at which a chi-square ball covers the mean pair loss with this confidence.

        The mean loss of the n pairs of B rows is a U-statistic with variance 4ζ/B, ζ the variance of the row means. Its
        upper confidence limit, mean + 2z√(ζ/B), is mean + √(2ρ·Var/n) for 2ρ/n = 4z²ζ/(B·Var), and the ball of that
        radius has (n/B)/(1 + 2ρ/n) effective pairs a row: `DroChiSquare(effective=...)`. Equal losses give n/B.

        Args:
            confidence: one-sided, between .5 and 1.
        """
        if not 0.5 < confidence < 1:
            raise ValueError(f"confident_pairs: confidence must lie between .5 and 1, but came as {confidence!r}.")
        there = (self.signs != 0).double()
        rows, size = there.sum(dim=1), there.sum()
        if self.losses.shape != self.signs.shape or not size:
            raise ValueError("confident_pairs: it needs one loss for each pair of the batch, which this loss has not.")
        losses, present = self.losses.double() * there, rows > 0
        means, mean = (losses.sum(dim=1) / rows.clamp_min(1))[present], losses.sum() / size
        variance = float((there * (losses - mean) ** 2).sum() / size)
        if not variance:
            return float(size / len(means))
        ratio = (2 * NormalDist().inv_cdf(confidence)) ** 2 * float(means.var(correction=0)) / (len(means) * variance)
        return float(size / len(means) / (1 + ratio))

    def __repr__(self) -> str:
        return (
            f"Explanation(value={self._value()}, active_positives={self.active_positives}, "
            f"active_negatives={self.active_negatives}, effective_pairs={self.effective_pairs:.1f})"
        )

    def _value(self) -> str:
        return f"{float(self.value):.6g}" if self.value.ndim == 0 else f"{len(self.value)} anchors"

    def _repr_html_(self) -> str:
        """A notebook table: positive and negative pairs side by side, and the pairs with the largest gradient."""
        strength = self.pull.abs()
        share = strength / strength.sum().clamp_min(torch.finfo(strength.dtype).tiny)
        sides = [self.signs > 0, self.signs < 0]
        rows = (
            ("pairs", *(int(side.sum()) for side in sides)),
            ("moved by the gradient", self.active_positives, self.active_negatives),
            ("share of the gradient", *(f"{100 * float(share[side].sum()):.1f}%" for side in sides)),
            ("mean score", *(f"{self.scores[side].mean():.3f}" if side.any() else "-" for side in sides)),
        )
        caption = f"value {self._value()}; the weight is spread over {self.effective_pairs:.1f} pairs"
        whole = table(("", "positive", "negative"), rows, caption=caption)
        flat = strength.flatten()
        strongest = flat.argsort(descending=True, stable=True)[:5].tolist()
        moved = [divmod(place, strength.shape[1]) for place in strongest if flat[place] > 0]
        if not moved:
            return whole
        words = {1: "positive", -1: "negative", 0: "none"}
        listed = [
            (i, j, words[int(self.signs[i, j])], f"{self.scores[i, j]:.3f}", f"{100 * share[i, j]:.1f}%")
            for i, j in moved
        ]
        head = ("anchor", "reference", "pair", "score", "share of the gradient")
        return whole + details("the pairs that are moved most", table(head, listed, words=(2,)))


def explain(product: Product, pairs: ScoredPairs) -> Explanation:
    """Solve the problems of `pairs`, and keep the weights and dual variables besides the value."""
    with torch.enable_grad():
        device = pairs.scores.device  # sets draw on the device of the scores, whichever device is current
        state = states(device)
        scores = pairs.scores.detach().requires_grad_()
        pairs = replace(pairs, scores=scores)
        problems = product.groups.split(product, pairs)
        value = _joined(product, pairs, problems)
        (pull,) = torch.autograd.grad(value.sum(), scores, allow_unused=True, materialize_grads=True)
        cut = tuple(replace(problem, losses=problem.losses.detach().requires_grad_()) for problem in problems)
        leaves = tuple(problem.losses for problem in cut)
        set_states(state, device)  # sets that draw at random must draw the same pairs again
        slopes = torch.autograd.grad(
            _joined(product, pairs, cut).sum(), leaves, allow_unused=True, materialize_grads=True
        )
    influence = [slope.reshape(problem.shape) for slope, problem in zip(slopes, problems, strict=True)]
    duals = [problem.dual() for problem in problems[:2]]
    spread = influence[0] if len(influence) == 1 else influence[0] + influence[1]
    if len(influence) == 3:  # lifted structure: the same negative pairs again, grouped by column
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
        signs=_signs(pairs),
        positives=positives(pairs)[1] if spread.ndim == 3 and not isinstance(product.groups, Bins) else None,
    )


def _joined(product: Product, pairs: ScoredPairs, problems: Problems) -> Tensor:
    return product.groups.join(product, pairs, problems, tuple(problem.value() for problem in problems))


def _losses(problems: Problems) -> Tensor:
    """A matrix of losses; for a pair in two groups, its loss as a positive pair."""
    whole = torch.zeros(problems[0].shape, dtype=problems[0].losses.dtype, device=problems[0].losses.device)
    for problem in reversed(problems):
        there = (problem.measure > 0).reshape(problem.shape)
        whole = torch.where(there, problem.losses.detach().reshape(problem.shape), whole)
    return whole


def _signs(pairs: ScoredPairs) -> Tensor:
    """Sign of each pair before mining: 1, -1, or 0 for none; a pair that is both positive and negative gets 1."""
    before = pairs.relation.dense()
    positive = (pairs.positive > 0) | (before.positive > 0)
    negative = (pairs.negative > 0) | (before.negative > 0)
    return positive.to(torch.int8) - (negative & ~positive).to(torch.int8)


def unexplained(value: Tensor) -> Explanation:
    """The explanation of an empty batch."""
    value = value.detach()
    none = value.new_zeros(0, 0)
    return Explanation(value, none, none, value.new_zeros(0), 0, 0, 0.0, 0.0, none, none, none, none)


def sum_explanations(parts: Sequence[tuple[float, Explanation]], columns: int) -> Explanation:
    """The explanation of Σ weight · loss: those of the losses side by side, as if the columns stood once for each."""
    each = [part for _, part in parts]
    if any(part.losses.ndim != each[0].losses.ndim for part in each):
        raise ValueError("explain: losses of pairs and of triplets have no common explanation; explain each of them.")
    joint: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in each], dim=1)
        for name in ("losses", "weights", "scores", "signs")
    }
    joint |= {
        name: torch.cat([weight * getattr(part, name) for weight, part in parts], dim=1)
        for name in ("influence", "pull")
    }
    spread, places = joint["influence"], [part.positives for part in each]
    found = [x + number * columns for number, x in enumerate(places) if x is not None]
    return Explanation(
        value=torch.stack([weight * part.value for weight, part in parts]).sum(),
        dual=torch.cat([part.dual.flatten() for part in each]),
        active_positives=sum(part.active_positives for part in each),
        active_negatives=sum(part.active_negatives for part in each),
        effective_pairs=float(over(spread.abs().sum() ** 2, (spread**2).sum())),
        weighted_loss=sum(weight * part.weighted_loss for weight, part in parts),
        positives=torch.cat(found, dim=1) if found else None,
        **joint,
    )
