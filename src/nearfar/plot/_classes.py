"""Figures of single classes: recall of the worst ones, and their confusion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from nearfar._utils.checks import check_choice
from nearfar.evaluation._evaluate import Evaluation, evaluate
from nearfar.plot._maps import rows_and_labels
from nearfar.plot.style import COLORS, GRAY, axis, class_words, frame, plain
from nearfar.report._confusion import Row, confusion
from nearfar.report._gallery import nearest
from nearfar.report._similarities import SIMILARITIES, Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def class_recall(evaluation: Evaluation, *, names: Mapping[int, str] | None = None, ax: Axes | None = None) -> Axes:
    """Plot recall@1 of the ten worst classes as bars, with the mean over all queries as a dashed line.

    Args:
        evaluation: the result of `nearfar.evaluate`, with labels.
        names: label -> name of the class.
        ax: the axis to draw on; a new figure if None.
    """
    if not isinstance(evaluation, Evaluation) or not evaluation.per_class:
        came = "one by a relation" if isinstance(evaluation, Evaluation) else type(evaluation).__name__
        raise TypeError(f"plot.class_recall: evaluation must be an Evaluation by labels, but came as {came}.")
    worst = evaluation.worst
    ax = axis(ax, (4.6, 0.9 + 0.27 * len(worst)))
    ax.barh(range(len(worst)), [100 * row.recall_at_1 for row in worst], color=COLORS[0], height=0.62)
    for place, row in enumerate(worst):
        text = f"{100 * row.recall_at_1:.0f}% of {row.queries}"
        inside = row.recall_at_1 > 0.7
        ax.annotate(text, (100 * row.recall_at_1, place), xytext=(-4 if inside else 4, 0), textcoords="offset points",
                    fontsize=7, va="center", ha="right" if inside else "left", color="white" if inside else "#222222",
                    bbox=None if inside else {"facecolor": "white", "linewidth": 0, "pad": 1})  # fmt: skip
    mean = 100 * evaluation.precision_at_1
    ax.axvline(mean, color=GRAY, linewidth=1, linestyle="--", zorder=0)
    ax.set_title(f"all queries: {mean:.1f}%", x=mean / 100, fontsize=8, color="#555555")
    ax.set_yticks(range(len(worst)), [class_words(row.label, names) for row in worst], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlim(0, 100)
    ax.set_xlabel("recall@1, %")
    plain(ax)
    return ax


def class_confusion(
    embeddings: Any,
    labels: Any = None,
    *,
    evaluation: Evaluation | None = None,
    names: Mapping[int, str] | None = None,
    similarity: Metric = "cosine",
    ax: Axes | None = None,
) -> Axes:
    """Plot the confusion of the ten worst classes: for each query, the class of its nearest neighbor.

    A row is a class of queries, a column the class that was found; the last column counts all other classes. The
    numbers are counts, the shade is their share of the row; right answers are framed.

    Args:
        embeddings: [n, d] a tensor, an array, lists or `Vectors`.
        labels: [n] integers; by default the y of `Vectors`.
        evaluation: an evaluation of the same rows, which determines the worst classes; computed if None.
        names: label -> name of the class.
        similarity: "cosine", "dot" or "euclidean".
        ax: the axis to draw on; a new figure if None.

    >>> import torch, nearfar as nf
    >>> from matplotlib.figure import Figure
    >>> rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9], [0.7, 0.8]])
    >>> ax = nf.plot.class_confusion(rows, torch.tensor([0, 0, 1, 1, 0]), ax=Figure().subplots())
    >>> [text.get_text() for text in ax.texts]
    ['2', '1', '', '', '2', '']
    """
    check_choice("plot.class_confusion", "similarity", similarity, SIMILARITIES)
    x, y = rows_and_labels("plot.class_confusion", embeddings, labels)
    found = evaluation or evaluate(x, y, ks=(1,), similarity=similarity, resamples=0)
    if len(found.per_query.labels) != len(y) or not bool((found.per_query.labels.cpu() == y).all()):
        raise ValueError("plot.class_confusion: evaluation must be of these rows, but is of other rows; pass None.")
    rows = np.flatnonzero(np.isin(y.numpy(), [row.label for row in found.worst]))
    return _draw_confusion(confusion(x, y, found, rows, nearest(x, rows, similarity)), names, ax)


def _draw_confusion(table: list[Row], names: Mapping[int, str] | None, ax: Axes | None) -> Axes:
    """Draw the table as a heat map with counts."""
    counts = np.array([row.counts for row in table])
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    ax = axis(ax, (2.4 + 0.36 * counts.shape[1], 1.6 + 0.36 * len(table)))
    ax.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (i, j), count in np.ndenumerate(counts):
        color = "white" if shares[i, j] > 0.55 else "#222222"
        ax.text(j, i, str(count) if count else "", ha="center", va="center", fontsize=8, color=color)
        if i == j:
            ax.add_patch(frame(j, i, 0.94, edgecolor="#222222", linewidth=1))
    words = [class_words(row.label, names) for row in table]
    ax.set_xticks(
        range(counts.shape[1]), [*words, "any other"], rotation=50, ha="right", rotation_mode="anchor", fontsize=8
    )
    ax.set_yticks(range(len(table)), words, fontsize=8)
    ax.set_xlabel("class of the nearest neighbor")
    ax.set_ylabel("class of the query")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return ax
