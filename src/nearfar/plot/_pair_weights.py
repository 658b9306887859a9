"""A figure of the weights that a loss gives to its pairs, against their scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from nearfar._utils.checks import check_choice
from nearfar.losses.explanation import Explanation
from nearfar.plot.style import COLORS, NEGATIVE, POSITIVE, axis, by_name, key, plain, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Quantity = Literal["weights", "influence", "pull"]
LABELS = {"weights": "weight p*", "influence": "influence |dF/dl|", "pull": "gradient |dF/ds|"}


def weights(
    explanation: Explanation | Mapping[str, Explanation],
    *,
    of: Quantity = "weights",
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Plot the weight of each pair against its score: positive pairs as disks, negative pairs as crosses.

    For triplets, a pair shows the sum over the triplets that contain it. Pairs of weight 0 are drawn pale, so that one
    sees how many pairs a loss ignores.

    Args:
        explanation: the result of `loss.explain`, or {name: explanation}, distinguished by color.
        of: "weights" is p*, which sums to 1 over each group of the loss; "influence" is |dF/dl|, and "pull" is
            |dF/ds|; the latter two can be compared between losses whose groups differ.
        legend: show a legend beside the axis.
        ax: the axis to draw on; a new figure if None.

    >>> import torch, nearfar as nf
    >>> from matplotlib.figure import Figure
    >>> rows = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> found = nf.losses.DroTopK(k=2).explain(rows, torch.tensor([0, 0, 1, 1]))
    >>> nf.plot.weights(found, ax=Figure().subplots()).get_ylabel()
    'weight p*'
    """
    several = by_name("weights", explanation, Explanation)
    check_choice("plot.weights", "of", of, LABELS)
    ax = axis(ax, (4.6, 3.2))
    for number, (name, each) in enumerate(several.items()):
        one = not name
        color = COLORS[number % len(COLORS)]
        for sign, word, mark, alone in ((1, "positive", "o", POSITIVE), (-1, "negative", "x", NEGATIVE)):
            scores, values = over_scores(each, sign, of)
            label = word if one else f"{words(name)}, {word}"
            _points(ax, scores, values, mark, alone if one else color, label)
    ax.set_xlabel("score")
    ax.set_ylabel(LABELS[of])
    ax.axhline(0, color="#8a8f94", linewidth=0.6, zorder=0)
    plain(ax)
    if legend:
        key(ax)
    return ax


def over_scores(found: Explanation, sign: int, of: Quantity) -> tuple[Tensor, Tensor]:
    """Scores and quantities of the pairs of one sign, sorted by score."""
    values = getattr(found, of).abs()
    if values.ndim == 3:
        values = of_triplets(found, values, sign)
    there = found.signs == sign
    scores, order = found.scores[there].cpu().sort()
    return scores, values[there].cpu()[order]


def of_triplets(found: Explanation, values: Tensor, sign: int) -> Tensor:
    """For each pair [n, m], the sum over the triplets [n, P, m] that contain it."""
    if sign < 0 or found.positives is None:
        return values.sum(dim=1)
    summed = torch.zeros(found.scores.shape, dtype=values.dtype, device=values.device)
    return summed.scatter_add_(1, found.positives, values.sum(dim=2))


def _points(ax: Axes, scores: Tensor, values: Tensor, mark: str, color: str, label: str) -> None:
    """Draw pairs with weight in full color, those without in a pale one."""
    zero = values == 0
    size = 16 if len(values) <= 2000 else 7
    # rasterize many points, because drawing them from a vector file is slow
    shared: dict[str, Any] = {"marker": mark, "color": color, "linewidths": 0.9, "rasterized": len(values) > 2000}
    ax.scatter(scores[zero].numpy(), values[zero].numpy(), s=0.6 * size, alpha=0.18, **shared)
    ax.scatter(scores[~zero].numpy(), values[~zero].numpy(), s=size, alpha=0.75, label=label, **shared)
