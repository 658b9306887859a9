"""A figure of the space in two dimensions: its two coordinates, or its two principal axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.checks import check_choice, check_seed
from nearfar._utils.tensors import check_embeddings, check_labels
from nearfar.evaluation._inputs import demand_classes, read_inputs
from nearfar.plot.style import COLORS, GRAY, MARKS, axis, class_words, key
from nearfar.report._maps import MOST_FOR_TSNE, principal, sample
from nearfar.report._similarities import SIMILARITIES, Metric, prepare

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def embedding_map(
    embeddings: Any,
    labels: Any = None,
    *,
    show: Sequence[int] | None = None,
    names: Mapping[int, str] | None = None,
    similarity: Metric = "cosine",
    points: int = MOST_FOR_TSNE,
    seed: int = 0,
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Plot embeddings as points in the plane, up to eight classes by color and marker, all others gray.

    Vectors of two dimensions are drawn unchanged; others are projected to their two principal axes, whose share of the
    variance is printed below.

    Args:
        embeddings: [n, d] a tensor, an array, lists or `Vectors`.
        labels: [n] integers; by default the y of `Vectors`.
        show: up to eight labels to color; the eight largest classes if None.
        names: label -> name of the class, for the legend.
        similarity: "cosine" uses unit rows, "dot" and "euclidean" the rows as given.
        points: the largest number of points; if there are more, whole classes are sampled, those of `show` first.
        seed: seed of the sample of classes.
        legend: show a legend beside the axis.
        ax: the axis to draw on; a new figure if None.

    >>> import torch, nearfar as nf
    >>> from matplotlib.figure import Figure
    >>> ax = nf.plot.embedding_map(torch.eye(6)[:, :4], torch.tensor([0, 0, 1, 1, 2, 2]), ax=Figure().subplots())
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['class 0', 'class 1', 'class 2']
    """
    check_choice("plot.embedding_map", "similarity", similarity, SIMILARITIES)
    check_seed("plot.embedding_map", seed)
    x, y = rows_and_labels("plot.embedding_map", embeddings, labels)
    chosen = _labels_to_color(y.numpy(), show)
    rows = sample(y.numpy(), chosen, points, seed)
    places, share = _coordinates(x[torch.from_numpy(rows)], similarity)
    mine = y.numpy()[rows]
    ax = axis(ax, (5.2, 3.3))
    others = ~np.isin(mine, chosen)
    if others.any():
        word = _others(len(np.unique(mine[others])), len(np.unique(y)) - len(chosen))
        ax.scatter(
            places[others, 0], places[others, 1], s=7, color=GRAY, alpha=0.45, linewidths=0, label=word, zorder=1
        )
    for number, label in enumerate(chosen):
        here = mine == label
        look: dict[str, Any] = {
            "color": COLORS[number],
            "marker": MARKS[number],
            "edgecolors": "white",
            "linewidths": 0.4,
        }
        ax.scatter(places[here, 0], places[here, 1], s=34, label=class_words(label, names), zorder=2, **look)
    kind = "coordinate" if share is None else "principal axis"
    ax.set_xlabel(f"{kind} 1" if share is None else f"{kind} 1\n(the two show {100 * share:.0f}% of the variance)")
    ax.set_ylabel(f"{kind} 2")
    ax.set_aspect("equal")
    ax.set_xticks([])
    ax.set_yticks([])
    if legend:
        key(ax)
    return ax


def rows_and_labels(owner: str, embeddings: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Check rows [n, d] and labels [n], and move them to the CPU."""
    given = read_inputs(owner, embeddings, labels)
    x, y = given.x.detach().cpu(), demand_classes(owner, given.y).detach().cpu()
    check_embeddings(owner, "embeddings", x)
    check_labels(owner, "labels", y, len(x), x.device)
    return x, y.long()


def _others(shown: int, there: int) -> str:
    count = str(shown) if shown == there else f"{shown} of {there}"
    return f"{count} other class{'es' * (there > 1)}"


def _labels_to_color(y: np.ndarray, show: Sequence[int] | None) -> list[int]:
    """The labels to color, ascending unless given."""
    found, counts = np.unique(y, return_counts=True)
    most = len(COLORS)
    if show is None:
        largest = np.lexsort((found, -counts))[:most]
        return sorted(found[largest].tolist())
    chosen = list(dict.fromkeys(int(label) for label in show))
    unknown = [label for label in chosen if label not in found]
    if unknown or len(chosen) > most:
        came = f"label {unknown[0]} has no rows" if unknown else f"{len(chosen)} came"
        raise ValueError(f"plot.embedding_map: show must be up to {most} labels that occur, but {came}.")
    return chosen


def _coordinates(x: Tensor, similarity: Metric) -> tuple[np.ndarray, float | None]:
    """Coordinates [n, 2] and their share of the variance, which is None if they are the rows themselves."""
    if x.shape[1] == 2:
        return x.double().numpy(), None
    axes, share = principal(prepare(x, similarity).double().numpy(), 2)
    return axes, share
